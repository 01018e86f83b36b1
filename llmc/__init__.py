"""What the programs share, a file an idea, named as llm.c names it where llm.c has it.

    errors      one line and an exit status for whatever a user can cause; Ctrl-C, SIGTERM and SIGHUP
    files       headers, sizes, files written beside their place and renamed
    settings    one dataclass -> command line, help
    tensors     tables: name -> shape; one buffer for a table, views of it
    checkpoint  model, debug state and optimizer state; resuming a run
    tokenizer, sampler, schedulers
    dataloader, shuffle   token files, and the order in which they are read
    evaluation  HellaSwag: examples, accuracy
    logger      main.log, main.csv
    progress    what a run prints: start, step lines, a terminal's bar
    precision   what a run on a GPU computes in
    threads     OpenBLAS's settings, and threads for what NumPy does on one core
    kernels     the files of kernels/ and their launch geometry
    compiler    kernels compiled, and kept in a cache
    device      the GPU: open, load, launch, streams
    matmul      matrix multiplication on the GPU: cuBLASLt or our kernels, and the search for the fastest
    trainer     a model in training on a GPU: buffers, the captured step, AdamW
    saver       its checkpoints, written while it goes on
    batch       a micro-batch as the GPU takes it: tokens, and their positions sorted
    memory      what the trainer allocates on the GPU, and whether that fits
    outliers    updates to skip
    launchers   several GPUs: torchrun, mpirun, srun, --gpus
    ranks       their processes: how they meet, what they tell each other, how they end together
    start       a program for GPUs: a process for each, with the same flags and model
    zero        who owns which parameters; gradients and weights on their way, by NCCL

Nothing here knows a model's passes, and whoever reads one passes the function that makes its table of parameters;
kernels and batch have what GPT-2's layers need, checkpoint's Config its sizes.
compiler, device, matmul, memory, start, trainer and zero's Nccl need CuPy and its companions; all others NumPy and the
standard library alone.
"""

from llmc.errors import quiet_imports

quiet_imports()

from llmc.threads import configure_openblas

configure_openblas()  # OpenBLAS reads these settings when NumPy is imported, which the other files do
