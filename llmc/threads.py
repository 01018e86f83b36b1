"""CPU threads. Matmuls run on OpenBLAS's; large element-wise loops are split into blocks of rows or elements. The
blocks do not depend on the number of threads, so neither do the results. One more thread reads data ahead."""

import os
import platform
import re
import signal
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait


def configure_openblas():
    """Set two environment variables that OpenBLAS reads when NumPy loads it, unless the user has set them.

    OpenBLAS's threads spin for 26 ms after a matmul before they sleep; here they would take the cores from the
    element-wise loops that follow. 2^12 cycles is enough to catch the next matmul of a series.
    OpenBLAS picks its kernels by CPU model, and takes an unknown one (AMD's Zen 4 and 5, for instance) for a Haswell:
    AVX2, half the speed. The SkylakeX kernels are AVX-512, for any CPU that has all the instructions they use.
    """
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
    if number:
        return int(number[1])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave_signals_alone():
    """Block signals in this thread: one delivered here would reach the main thread, which handles it, late."""
    if hasattr(signal, "pthread_sigmask"):  # Windows has none
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


THREADS = count_threads()
POOL = ThreadPoolExecutor(max(1, THREADS - 1), "llmc", leave_signals_alone)  # starts no thread before the first task
BLOCK = 128 * 1024  # elements: small enough for the L2 cache, large enough that handing over the GIL is cheap


def parallel_blocks(work, n, block=BLOCK):
    """Call work(start, stop) for consecutive blocks of range(n), on all threads; NumPy's loops release the GIL."""
    starts = iter(range(0, n, block))  # next() on a range iterator is atomic under the GIL

    def take():
        for start in starts:
            work(start, min(start + block, n))

    helpers = [POOL.submit(take) for _ in range(min(THREADS, -(-n // block)) - 1)]
    take()
    for helper in helpers:
        helper.result()


READER = ThreadPoolExecutor(1, "reader", leave_signals_alone)
END = object()


def read_ahead(items, ahead):
    """Yield the items of a generator; a thread computes up to `ahead` of them before they are asked for. An exception
    of the generator is raised when its turn comes."""
    waiting = deque(READER.submit(next, items, END) for _ in range(ahead))
    try:
        while (item := waiting.popleft().result()) is not END:
            waiting.append(READER.submit(next, items, END))
            yield item
    finally:
        wait([future for future in waiting if not future.cancel()])
