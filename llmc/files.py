"""What all file formats share: a header of 256 little-endian int32, size checks before anything is
allocated, and writes to a temporary file that is renamed when complete."""

import contextlib
import os
import re
import stat

import numpy as np

from llmc.errors import UserError

MODEL_MAGIC = 20240326
STATE_MAGIC = 20240327
TOKENIZER_MAGIC = 20240328
TOKENS_MAGIC = 20240520
EXAMPLES_MAGIC = 20240522
OPTIMIZER_MAGIC = 20240527
TOKENS32_MAGIC = 20240801
LLAMA_MAGIC = 20240803
SPEEDRUN_MAGIC = 20261128  # ours
KINDS = {
    MODEL_MAGIC: "GPT-2 checkpoint of train_gpt2.py",
    LLAMA_MAGIC: "Llama 3 checkpoint of train_llama3.py",
    SPEEDRUN_MAGIC: "checkpoint of train_speedrun.py",
    STATE_MAGIC: "debug state",
    TOKENIZER_MAGIC: "tokenizer",
    TOKENS_MAGIC: "token file",
    TOKENS32_MAGIC: "token file",
    EXAMPLES_MAGIC: "file of evaluation examples",
    OPTIMIZER_MAGIC: "checkpoint's optimizer state",
}
HEADER_BYTES = 1024
FILE_CHUNK = 1 << 20  # elements that file readers and writers hold at a time
EXPORT = "make it with: python export_weights.py"  # for a missing model or GPT-2's tokenizer
HELLASWAG = "data/hellaswag_val.bin"


def complete_checkpoints(directory):
    """The steps of the complete checkpoints in a directory, ascending; none if there is no such
    directory."""
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(directory)
    return sorted(int(name.removeprefix("DONE_")) for name in names
                  if re.fullmatch(r"DONE_\d{8}", name))


def export_hint(path):
    """The hint for a missing or damaged file of export_weights.py: the command that makes a file of
    this name."""
    label = re.match(r"(?:gpt2|llama3|speedrun)_(124M|355M|774M|1558M|[dls]\d+)[_.]",
                     os.path.basename(path))
    names = {"124M": "gpt2", "355M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}
    if os.fspath(path).endswith("_debug_state.bin"):
        return f"{EXPORT} --model {label[1] if label else 'MODEL'} --input TOKENS_val.bin"
    directory, name = os.path.split(os.fspath(path))
    if step := re.fullmatch(r"model_(\d{8})\.bin", name):  # of a run
        others = [other for other in complete_checkpoints(directory) if other != int(step[1])]
        if others:
            return f"pass --checkpoint {others[-1]}, another one of the run"
    return (f"{EXPORT} --model {names.get(label[1], label[1])}".removesuffix(" --model gpt2")
            if label else
            "expected the directory of a run, or a .bin file (make one with: python"
            " export_weights.py)")


def open_input(path, hint):
    """Open a file for reading. Raises UserError, whose message ends in `hint`: how to get such a
    file."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise UserError(f"{path or repr(path)}: no such file; {hint}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {hint}") from None


@contextlib.contextmanager
def errors_of_writing(path, verb="written"):
    """Context manager: an error of the operating system becomes a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        # not from the disk: the errors of the package requests are OSErrors too
        if error.errno is None:
            raise
        raise UserError(f"{path}: cannot be {verb} ({error.strerror})") from None


complete = None  # within all_or_none(): pairs of a file of `replacing`, and what it will replace


@contextlib.contextmanager
def all_or_none():
    """Context manager: what `replacing` writes within it replaces the old files together, at its
    end; after an exception, none of them. Not for threads."""
    global complete
    complete = []
    try:
        yield
        for written, target in complete:
            with errors_of_writing(target):
                os.replace(written, target)
    finally:
        for written, _ in complete:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(written)
        complete = None


@contextlib.contextmanager
def replacing(path):
    """Context manager: yields a temporary file, which replaces `path` once it is complete and on
    the disk. Raises UserError when it cannot be written; the old file at `path` is then untouched.
    A link is followed. A pipe or a character device, such as /dev/null, is written to, and stays
    one."""
    mode = os.stat(path).st_mode if os.path.exists(path) else stat.S_IFREG
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with errors_of_writing(path), open(path, "wb") as f:
            yield f
        return
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: cannot be written (a directory or a device, expected a file)")

    target = os.path.realpath(path)
    with errors_of_writing(path), open(f"{target}.tmp", "wb") as f:
        try:
            yield f
            f.flush()
            os.fsync(f.fileno())
            if complete is None:
                os.replace(f.name, target)
            else:
                complete.append((f.name, target))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f.name)
            raise


@contextlib.contextmanager
def locked(directory, flag="-o"):
    """Context manager: makes a directory (None: does nothing) and locks it. Raises UserError, which
    names `flag`, if another run has the lock. The system releases it however the process ends."""
    if not directory:
        yield
        return
    import fcntl  # here: Windows has none
    make_directory(directory)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{directory}: another run writes there: choose another {flag}, or stop it"
                        " first") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def make_directory(path):
    with errors_of_writing(path, "made a directory"):
        os.makedirs(path or ".", exist_ok=True)


def make_header(magic, version, *fields):
    header = np.zeros(256, "<i4")
    header[: 2 + len(fields)] = magic, version, *fields
    return header


def read_header(f, magic, hint, size=HEADER_BYTES):
    """Read the header of `size` bytes, int32; raises UserError if the file is of another kind."""
    data = f.read(size)
    kind = KINDS[magic]
    if len(data) < size:
        raise UserError(f"{f.name}: {len(data)} bytes, expected a {kind} with a {size}-byte"
                        f" header; {hint}")
    header = np.frombuffer(data, "<i4")
    if header[0] != magic:
        if {int(header[0]), magic} <= {MODEL_MAGIC, LLAMA_MAGIC, SPEEDRUN_MAGIC}:
            hint = "run the other page"
        found = (f"it is a {KINDS[header[0]]} (magic {header[0]})" if header[0] in KINDS
                 else f"magic {header[0]}")
        raise UserError(f"{f.name}: {found}, expected a {kind} (magic {magic}); {hint}")
    return header


def check_size(f, expected, what, hint):
    """Raise UserError unless the open file has `expected` bytes, so that nothing is allocated for a
    damaged file."""
    found = os.fstat(f.fileno()).st_size
    if found != expected:
        state = "cut short" if found < expected else "too long"
        raise UserError(f"{f.name}: {found} bytes, expected {expected} for {what} ({state}); {hint}")


def read_into(f, array):
    """Fill a contiguous array from the file; raises UserError if it ends early, although its size
    was checked."""
    if f.readinto(memoryview(array).cast("B")) != array.nbytes:
        raise UserError(f"{f.name}: ended early: did another program write to it just now?")


def chunks(array):
    """Yield a flat array in consecutive chunks of at most FILE_CHUNK elements."""
    return (array[i : i + FILE_CHUNK] for i in range(0, array.size, FILE_CHUNK))
