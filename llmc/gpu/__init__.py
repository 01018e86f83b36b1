"""What only a run on GPUs uses: one idea a file.

    device      the GPU: open, load, launch, streams
    compiler    compiling kernels, and caching them
    geometry    the files of kernels/ and their launch geometry
    precision   the dtypes of a run, and MFU's peak
    matmul      matrix multiplication by our kernels or, in cublaslt, by NVIDIA's library
    fp8         matmuls of 8-bit operands, and their scales
    trainer     what surrounds a page's step: buffers and whether they fit, batches, reports, state
    batch       a micro-batch on the GPU: tokens, and their positions sorted
    saver       checkpoints of a trainer, written while training goes on
    decoder     text: passes with a KV cache, sampling
    launcher    on how many GPUs a program runs
    shares      which rank owns which parameters
    several/    what only a run on more than one GPU uses: ranks, its processes; zero, ZeRO: sending gradients and
                weights by NCCL, and each rank's share of a checkpoint
"""
