"""What only a run on GPUs uses: one idea a file.

    geometry    the files of kernels/ and their launch geometry
    compiler    compiling kernels, and caching them
    device      the GPU: open, load, launch, streams
    precision   the dtypes of a run
    matmul      matrix multiplication: cuBLASLt or our kernels
    trainer     training a model: buffers, the captured step, AdamW
    batch       a micro-batch as the GPU takes it: tokens, and their positions sorted
    memory      what the trainer allocates, and whether it fits
    saver       checkpoints of a trainer, written while training goes on
    ranks       the processes of a run on several GPUs: torchrun and torch.distributed
    zero        ZeRO: which rank owns which parameters; sending gradients and weights by NCCL
"""
