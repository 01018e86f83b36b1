"""What the programs share: one idea a file, with llm.c's name where llm.c has the same file.

    loop        what a run does around its updates: validates, samples, logs, saves, resumes, stops
    settings    one dataclass -> command line, help
    tensors     tables: name -> shape; one buffer for each table, and views of it
    files       headers, size checks, writes to a temporary file that is then renamed
    checkpoint, debugstate   the files of models and optimizer states; what test_gpt2.py compares with
    api         a model from Python, and which page a file is of
    recorder    what a training step does, as it runs: for look.py
    huggingface   models of Hugging Face's folders
    vocabulary, hf_tokenizer   text to ids and back; the tokenizers of such folders
    chat        chat templates: a conversation's text, tokens, and which of them an assistant says
    resume      a run's checkpoints: saving one, resuming from one
    dataloader, shuffle   token files, and the order in which they are read
    logger, progress, llmc_lines   main.log and main.csv; what a run prints; llm.c's lines instead
    hellaswag, tokenizer, sampler, schedulers; outliers: which updates to skip; threads
    errors      one line and an exit status for every error that a user can cause; Ctrl-C, SIGTERM
    single_process   the ranks of a run of one process (llmc/gpu/several/ranks.py: of several GPUs)
    gpu/        what only a run on GPUs uses

No file here has a forward or backward pass: those are on the pages, train_gpt2.py and so on.
Functions get a page's class as their argument `architecture`."""

from llmc.threads import configure_openblas

# OpenBLAS reads these settings when NumPy is imported, which the other files do
configure_openblas()
