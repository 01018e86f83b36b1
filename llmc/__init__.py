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
    threads     OpenBLAS's settings, and threads for what NumPy does on one core
    outliers    which updates to skip
    gpu/        what only a run on GPUs uses

No file here knows a model's forward or backward pass; functions that read a model take the function that makes its
parameter table.
"""

from llmc.errors import quiet_imports

quiet_imports()

from llmc.threads import configure_openblas

configure_openblas()  # OpenBLAS reads these settings when NumPy is imported, which the other files do
