"""What all file formats share: a header of 256 little-endian int32, size checks before anything is allocated, and
writes to a temporary file that is renamed when complete, so that no file is ever half-written."""

import contextlib
import errno
import os
import stat
import zlib

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

import numpy as np

from llmc.errors import UserError

MODEL_MAGIC, STATE_MAGIC, TOKENIZER_MAGIC = 20240326, 20240327, 20240328
TOKENS_MAGIC, EXAMPLES_MAGIC, OPTIMIZER_MAGIC = 20240520, 20240522, 20240527
KINDS = {
    MODEL_MAGIC: "model checkpoint",
    STATE_MAGIC: "debug state",
    TOKENIZER_MAGIC: "tokenizer",
    TOKENS_MAGIC: "token file",
    EXAMPLES_MAGIC: "file of evaluation examples",
    OPTIMIZER_MAGIC: "optimizer state",
}
HEADER_BYTES = 1024
EXPORT = "make it with: python export_weights.py"  # for a missing model or tokenizer


def open_input(path, mend):
    """Open a file for reading, or raise UserError; its message ends in `mend`, which says how to get such a file."""
    try:
        check_is_file(path, mend)
        return open(path, "rb")
    except FileNotFoundError:
        raise UserError(f"{path or repr(path)}: no such file; {mend}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory, expected a file; {mend}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {mend}") from None


def check_is_file(path, mend):
    """Raise UserError for a FIFO, socket or device, which may block or never end; open() reports a missing file."""
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UserError(f"{path}: is a FIFO, a socket or a device, expected a file; {mend}")


@contextlib.contextmanager
def replacing(path):
    """Context manager: yields a temporary file to write, and renames it to `path` once it is complete and on the disk.

    Inside together(), it is renamed when that ends. Raises UserError when it cannot be written (no permission, disk
    full, another process is writing it); an old file at `path` is then untouched. A link is followed.
    """
    target, done = os.path.realpath(path), False
    check_is_file(target, "choose another name")  # root could replace /dev/null
    with errors_of_writing(path):
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        f = open_temporary(path, f"{target}.tmp")
    try:
        with errors_of_writing(path):
            yield f
            f.flush()
            os.fsync(f.fileno())
            if WAITING:
                WAITING[-1].append((f, target, path))
                if len(WAITING[-1]) > 1:  # the first one's lock is enough, and there may be thousands
                    f.close()
            else:
                rename(f, target)
            done = True
    finally:
        if not done:
            discard(f)


def open_temporary(path, temporary):
    """Open the temporary file of `path`, empty and locked; raises UserError when another process is writing it."""
    while True:
        f = open(temporary, "wb", opener=lambda name, flags: os.open(name, flags & ~os.O_TRUNC, 0o666))
        if not lock_file(f):
            f.close()
            raise UserError(f"{path}: another process is writing it: wait for that, or choose another name")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(temporary), os.fstat(f.fileno())):
                f.truncate()
                return f
        f.close()  # the other process has renamed it since


def rename(f, target):
    if not fcntl:  # on Windows, where an open file cannot be renamed
        f.close()
    os.replace(f.name, target)
    f.close()  # and with it the lock: from here on, another process may write the file
    sync_directory(os.path.dirname(target))


def discard(f):
    with contextlib.suppress(OSError):
        os.unlink(f.name)
    with contextlib.suppress(OSError):  # of what is still buffered
        f.close()


WAITING = []  # for each active together(): [(temporary file, where it goes, path)]


@contextlib.contextmanager
def together():
    """Context manager: files that `replacing` writes inside it are renamed at its end, or not at all after an error."""
    files = []
    WAITING.append(files)
    try:
        yield
        while files:
            f, target, path = files[-1]  # the first one, which has the lock, comes last
            with errors_of_writing(path):
                rename(f, target)
            files.pop()
    finally:
        WAITING.pop()
        for f, *_ in files:
            discard(f)


@contextlib.contextmanager
def errors_of_writing(path):
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not from the disk: the errors of the package requests are OSErrors too
            raise
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def locked(output, directory, flag="-o"):
    """Context manager: locks -o, a directory or a file. Raises UserError, which names `flag`, if another run has it.

    The system releases the lock however the process ends. Where there are no locks, nothing is refused.
    """
    if not output:
        yield
        return
    path = lock_path(output, directory)
    made = os.path.dirname(path) if not os.path.isdir(os.path.dirname(path) or ".") else None
    make_directory(os.path.dirname(path))
    file = open_lock(path, output, flag)
    while not (os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno()))):
        file.close()  # the previous run removed it after we had opened it
        file = open_lock(path, output, flag)
    with file:
        with contextlib.suppress(OSError):  # the disk may be full
            os.truncate(file.fileno(), 0)
            os.write(file.fileno(), b"%d" % os.getpid())
            os.fsync(file.fileno())  # so that other machines see it
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
                if made:
                    os.rmdir(made)  # if it is still empty


def lock_path(output, directory):
    return f"{os.path.join(output, 'main.log') if directory else output}.lock"  # -o DIR/main.log is the same file


def open_lock(path, output, flag):
    """Open the lock file and lock it, until it is closed; raises UserError when another run holds it."""
    try:
        file = open(path, "a+b", buffering=0)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another {flag}") from None
    if not lock_file(file):
        file.seek(0)
        process = file.read().decode() or "?"
        raise UserError(f"{output}: process {process} is a run that writes there: choose another {flag}, or stop"
                        " it first")
    return file


def lock_file(file):
    """Lock an open file until it is closed, where there are locks; returns False if another process has it."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def sync_directory(path):
    """Make a rename durable, on file systems that can."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(path or ".", os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directory(path):
    try:
        os.makedirs(path or ".", exist_ok=True)
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", "too many levels")
        raise UserError(f"{path}: cannot make this directory ({reason})") from None


def make_header(magic, version, *fields):
    header = np.zeros(256, "<i4")
    header[0], header[1] = magic, version
    header[2 : 2 + len(fields)] = fields
    return header


def read_header(f, magic, mend):
    """Read the header, (256,) int32; raises UserError if the file is of another kind."""
    data = f.read(HEADER_BYTES)
    kind = KINDS[magic]
    if len(data) < HEADER_BYTES:
        raise UserError(f"{f.name}: {len(data)} bytes, expected a {kind} with a {HEADER_BYTES}-byte header; {mend}")
    header = np.frombuffer(data, "<i4")
    if header[0] != magic:
        found = KINDS.get(int(header[0]))
        found = f"it is a {found} (magic {header[0]})" if found else f"magic {header[0]}"
        raise UserError(f"{f.name}: {found}, expected a {kind} (magic {magic}); {mend}")
    return header


def file_crc(path):
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as f:
        while piece := f.read(4 * CHUNK):
            crc = zlib.crc32(piece, crc)
    return crc


def check_size(f, expected, what, mend):
    """Raise UserError unless the open file has `expected` bytes, so that nothing is allocated for a damaged file."""
    found = os.fstat(f.fileno()).st_size
    if found != expected:
        state = "cut short" if found < expected else "too long"
        raise UserError(f"{f.name}: {found} bytes, expected {expected} for {what} ({state}); {mend}")


def read_into(f, array):
    """Fill a contiguous array from the file; raises UserError if it ends early, although its size was checked."""
    if f.readinto(memoryview(array).cast("B")) != array.nbytes:
        raise UserError(f"{f.name}: ended early: did another program write to it just now?")


CHUNK = 1 << 20  # elements that file readers and writers hold at a time


def chunks(array):
    """Yield a flat array in consecutive pieces of at most CHUNK elements."""
    return (array[i : i + CHUNK] for i in range(0, array.size, CHUNK))
