"""What the programs share: one idea a file, with llm.c's name where llm.c has the same file.

    errors      one line and an exit status for every error that a user can cause; Ctrl-C, SIGTERM and SIGHUP
    files       headers, size checks, atomic writes: to a temporary file, then renamed
    settings    one dataclass -> command line, help
    tensors     tables: name -> shape; one buffer for each table, and views of it
    checkpoint  the files of models, debug states and optimizer states
    resume      checkpoints of a run: saving one, resuming from one
    tokenizer, sampler, schedulers
    dataloader, shuffle   token files, and the order in which they are read
    evaluation  HellaSwag: examples, accuracy
    logger      main.log, main.csv
    progress    what a run prints: header, step lines, a progress bar on a terminal
    precision   the dtypes of a run on a GPU
    threads     OpenBLAS's settings, and threads for what NumPy does on one core
    kernels     the files of kernels/ and their launch geometry
    compiler    compiling kernels, and caching them
    device      the GPU: open, load, launch, streams
    matmul      matrix multiplication on the GPU: cuBLASLt or our kernels, and the search for the fastest
    trainer     training a model on a GPU: buffers, the captured step, AdamW
    saver       checkpoints of a trainer, written while training goes on
    batch       a micro-batch as the GPU takes it: tokens, and their positions sorted
    memory      what the trainer allocates on the GPU, and whether it fits
    outliers    which updates to skip
    launchers   starting a process for each GPU: torchrun, mpirun, srun, --gpus
    ranks       these processes: how they meet, exchange small values, and end together
    start       how a GPU program starts: one process per GPU, all with the same flags and model
    zero        ZeRO: which rank owns which parameters; sending gradients and weights by NCCL

No file here knows a model's forward or backward pass; functions that read a model take the function that makes its
parameter table. kernels and batch have what GPT-2's layers need, checkpoint's Config has GPT-2's sizes.
compiler, device, matmul, memory, start, trainer and zero's Nccl need CuPy and its companion packages; the others need
only NumPy and the standard library.
"""

from llmc.errors import quiet_imports

quiet_imports()

from llmc.threads import configure_openblas

configure_openblas()  # OpenBLAS reads these settings when NumPy is imported, which the other files do
