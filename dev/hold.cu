// Keep a CUDA stream busy while the host launches the kernels that it is going to time, so that their time does not
// include the launches. One thread.
extern "C" __global__ void hold(int microseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < 1000ll * microseconds);
}
