"""CPU threads. Matmuls use OpenBLAS's; large element-wise loops are split into blocks of rows or elements. The blocks,
and so the results, do not depend on the number of threads."""

import os
import platform
import re
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
