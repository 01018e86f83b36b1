"""CPU threads. Matmuls use OpenBLAS's, and it rounds sums differently with another number of them.
Large element-wise loops are split into blocks of rows or elements, whatever the number is.

Beside busy programs, several threads are slower than one: those of a matmul wait for each other
several times, and each time until the system stops another program, which takes milliseconds."""

import ctypes
import os
import platform
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor


def configure_openblas():
    """Set two variables that OpenBLAS reads when NumPy loads it, unless the user has. After a matmul, its threads spin
    for 26 ms, on cores that the next element-wise loops need; 2^12 cycles are enough for a series of matmuls. For a CPU
    that it does not know (a new AMD), it picks Haswell's kernels: AVX2, half the speed of SkylakeX's, AVX-512."""
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "12")
    if "OPENBLAS_CORETYPE" in os.environ or platform.machine() != "x86_64" or not os.path.exists("/proc/cpuinfo"):
        return
    with open("/proc/cpuinfo") as f:
        flags = next((line for line in f if line.startswith("flags")), "").split()
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags):
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"


def count_threads():
    """OMP_NUM_THREADS if set (OpenBLAS reads it too), else the cores that this process may use."""
    number = re.match(r"\s*0*([1-9][0-9]{0,3})(?![0-9])", os.environ.get("OMP_NUM_THREADS", ""))  # like C's atoi
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(number[1]) if number else cores


THREADS = count_threads()
POOL = ThreadPoolExecutor(max(1, THREADS - 1), "llmc")  # starts no thread before the first task
BLOCK = 128 * 1024  # elements: small enough for the L2 cache, large enough that handing over the GIL is cheap


def parallel_blocks(work, n, block=BLOCK):
    """Return [work(start, stop)] of consecutive blocks of range(n), on all threads: NumPy's loops release the GIL."""
    starts = iter(range(0, n, block))  # next() on a range iterator is atomic under the GIL
    results = [None] * -(-n // block)

    def take():
        for start in starts:
            results[start // block] = work(start, min(start + block, n))

    helpers = [POOL.submit(take) for _ in range(min(THREADS, len(results)) - 1)]
    take()
    for helper in helpers:
        helper.result()
    return results


def is_given():
    """Whether the user has set the number of threads."""
    return bool({"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"} & os.environ.keys())


def fit_threads(kept=None):
    """Choose the number of threads of a run, and return it; a note says what is unusual about it.
    It is the user's; else `kept`, of the run that is resumed, for the same bits; else one for each
    core that other programs leave free."""
    global THREADS
    cores, wanted = THREADS, kept
    if is_given() or kept and kept > cores:
        if kept and kept != cores:
            print(f"note: the run had {kept} threads, now it has {cores}: sums may be rounded"
                  f" differently (OMP_NUM_THREADS={kept} continues bit for bit)", file=sys.stderr)
        return cores

    if not kept:
        others = Others()
        for _ in range(3):  # they may be busy for a moment only
            time.sleep(0.1)
            busy = others.cores()
            if busy < 0.5:
                break
        wanted = max(1, cores - round(busy))

    if wanted != cores and set_openblas_threads(wanted):
        THREADS = wanted
        if not kept:
            print(f"note: other programs use {busy:.1f} of {cores} cores: this run has {wanted} of"
                  f" {cores} threads (OMP_NUM_THREADS={cores}: all)", file=sys.stderr)
    return THREADS


def set_openblas_threads(number):
    """Set the number of threads of NumPy's OpenBLAS; return whether it has one."""
    from numpy._core import _multiarray_umath

    library = ctypes.CDLL(_multiarray_umath.__file__)
    for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
                 "openblas_set_num_threads64_", "openblas_set_num_threads"):
        if hasattr(library, name):
            getattr(library, name)(number)
            return True
    return False


class Others:
    """How busy other programs keep the cores that this process may use (Linux; elsewhere 0)."""

    def __init__(self):
        self.last = self.measure()
        self.is_said = is_given()

    @staticmethod
    def measure():
        """(now, the core seconds that they have used so far), in seconds."""
        now = time.perf_counter()
        if not os.path.exists("/proc/stat"):
            return now, 0.0
        with open("/proc/stat") as f:
            rows = [line.split() for line in f if line.startswith("cpu")]
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        busy = 1, 2, 3, 6, 7, 8  # all columns but idle, and waiting for a disk
        ticks = sum(int(row[i]) for row in rows if row[0] in mine for i in busy)
        return now, ticks / os.sysconf("SC_CLK_TCK") - time.process_time()

    def cores(self):
        """How many cores they have used since the last call, on average."""
        began, used_before = self.last
        self.last = self.measure()
        return (self.last[1] - used_before) / (self.last[0] - began)

    def slow_down(self):
        """After an update: None, or once, what to tell the user if others have shared the cores of
        several threads for some seconds."""
        if self.is_said or THREADS == 1 or time.perf_counter() - self.last[0] < 5.0:
            return None
        busy, cores = self.cores(), count_threads()
        if busy < 0.5 or busy + THREADS <= cores + 0.5:
            return None
        self.is_said = True
        return (f"other programs use {busy:.1f} of {cores} cores, which makes {THREADS} threads"
                f" slow: OMP_NUM_THREADS={max(1, cores - round(busy))} may be faster (and rounds"
                " sums differently)")
