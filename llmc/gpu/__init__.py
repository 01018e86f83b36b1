"""What only a run on GPUs uses: one idea a file.

    device      the GPU: open, load, launch, streams
    compiler    compiling kernels, and caching them
    geometry    the files of kernels/ and their launch geometry
    precision   the dtypes of a run, and MFU's peak
    matmul      linear layers, by our kernels or, in cublaslt, by NVIDIA's library
    fp8, fp8_linears   linear layers with operands of 8 bits, and their scales
    attention   launches of attention's kernels
    memory      allocations
    plan        what a run allocates, and whether it fits
    trainer     what surrounds a page's step: batches, the graph, reports
    batch       a micro-batch on the GPU: tokens, and their positions sorted
    saver       checkpoints of a trainer, written while training goes on
    decoder     text: passes with a KV cache, sampling
    launcher    on how many GPUs a program runs
    messages    what a step tells other GPUs: on one, nothing
    shares      which rank owns which parameters
    several/    what only a run on more than one GPU uses: ranks, its processes; nccl, which moves
                bytes; zero, how gradients and weights travel
"""
