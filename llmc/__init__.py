"""What the programs share: one idea a file, with llm.c's name where llm.c has the same file.

    loop        what a run does around its updates: validate, sample, log, save, resume, stop on a signal
    models      which page a model belongs to, by its checkpoint's magic number
    settings    one dataclass -> command line, help
    tensors     tables: name -> shape; one buffer for each table, and views of it
    files       headers, size checks, writes to a temporary file that is then renamed
    checkpoint  the files of models and optimizer states
    debugstate  the file of a debug state, with which test_gpt2.py checks parity
    resume      a run's checkpoints: saving one, resuming from one
    dataloader, shuffle   token files, and the order in which they are read
    evaluation  HellaSwag: examples, accuracy
    tokenizer, sampler, schedulers
    logger      main.log, main.csv
    progress    what a run prints: header, step lines, a progress bar on a terminal
    outliers    which updates to skip
    threads     OpenBLAS's settings, and threads for what NumPy does on one core
    errors      one line and an exit status for every error that a user can cause; Ctrl-C and SIGTERM
    alone       a run of a single process, where a run on several GPUs has ranks
    gpu/        what only a run on GPUs uses

No file here knows a model's forward or backward pass; functions that read a model take its architecture: the class of a
page, with MAGIC, Config, parameter_table and random_model.
"""

from llmc.threads import configure_openblas

configure_openblas()  # OpenBLAS reads these settings when NumPy is imported, which the other files do
