"""Errors and interruptions: an error that a user can cause is one line on stderr and an exit status, no traceback."""

import contextlib
import io
import os
import select
import signal
import sys
import threading
import time
import traceback

DIVERGED = "try a lower -l, a warm-up (-u) or --grad_clip 1"  # what to do about a loss that is not finite


class UserError(Exception):
    """An error that the user can fix. The message is one line: what, found, expected, and the command that fixes it."""


def run_main(main):
    """Run `main()` and exit with the status that it returns, 1 for an error that a user can cause, 130 for Ctrl-C."""
    program = os.path.basename(sys.argv[0])
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as quiet_imports left it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = interrupt_again
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the program was started with it closed
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdin, io.TextIOWrapper):  # a test's is not
        sys.stdin.reconfigure(errors="surrogateescape")  # as in sys.argv: what is read may not be UTF-8
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # a file name may not be printable
    try:
        try:
            status = main()
        except SystemExit as done:  # from argparse, after --help for example
            status = done.code
        sys.stdout.flush()  # here, because at exit Python itself would report the closed pipe of `--help | true`
        sys.exit(status)
    except (UserError, MemoryError) as error:
        text, _ = describe(error)
        sys.exit(f"{program}: {text}")
    except (KeyboardInterrupt, OSError) as error:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # the next one ends it at once
        text, status = describe(error)
        begin = "\n" if isinstance(error, KeyboardInterrupt) else ""  # after the terminal's ^C
        if text:
            with contextlib.suppress(OSError):  # in `... | tee log`, Ctrl-C ends tee too
                print(f"{begin}{program}: {text}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def interrupt_again(lost):
    """sys.unraisablehook: repeat a Ctrl-C that came in a destructor, where Python only prints exceptions."""
    if lost.exc_type is KeyboardInterrupt:
        if not sys.is_finalizing():  # at exit, no thread can start
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


def describe(error):
    """Return (message or None, exit status) for an exception that ends a program."""
    if isinstance(error, UserError):
        return "error: " + str(error).replace("\n", "\\n"), 1  # from a file name
    if isinstance(error, MemoryError):
        return f"error: out of memory ({error or 'no details'}); try a smaller batch or model", 1
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, BrokenPipeError):  # `... | head`: nobody needs a message
        return None, 1
    if isinstance(error, OSError):
        where = error.filename or stdout_fails() and "standard output"
        return f"error: {f'{where}: ' if where else ''}{error.strerror or error}", 1
    if isinstance(error, SystemExit):
        return (None, error.code or 0) if isinstance(error.code, int | None) else (error.code, 1)
    return "".join(traceback.format_exception(error)).rstrip(), 1


def stdout_fails():
    """Whether every write to stdout fails, even one of 0 bytes."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
        return False
    except OSError:
        return True


def quiet_imports():
    """Let Ctrl-C end our programs without a traceback until run_main takes over; leave others, like pytest, alone."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    main = sys.modules.get("__mp_main__", sys.modules["__main__"])  # the former in a multiprocessing child
    program = os.path.abspath(getattr(main, "__file__", None) or root)
    ours = [os.path.join(root, *names) for names in ((), ("dev",), ("dev", "kernels"))]
    if os.path.dirname(program) in ours and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


FINISHING = "finishing this step; Ctrl-C once more to stop at once"


class Interrupted(Exception):
    """Raised between the batches of a validation, or the tokens of a sample, once a signal has come."""


class Interruption:
    """Remembers Ctrl-C, SIGTERM and SIGHUP (unless nohup ignores it), so that a run can save and stop at the next safe
    point. A second Ctrl-C stops at once, except while a checkpoint is being saved.

    By then, stdout and stderr may have no reader: in `python train_gpt2.py 2>&1 | tee log`, Ctrl-C ends tee too.
    """

    def __init__(self, agree=None, speaks=True):
        """agree(number): turns this rank's signal, or None, into one for all ranks, as Ranks.largest does. speaks:
        whether this process prints messages; of several ranks, one does."""
        self.signal, self.is_saving, self.say = None, False, sys.stderr.write
        self.agree, self.speaks, self.heard = agree or (lambda number: number), speaks, False
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            stream.flush()
            with contextlib.suppress(io.UnsupportedOperation):  # a notebook's stream is no file
                raw = LosableOutput(stream, self)
                wrapper = type(stream) if isinstance(stream, io.TextIOWrapper) else io.TextIOWrapper
                setattr(sys, name, wrapper(io.BufferedWriter(raw), stream.encoding, stream.errors,
                                           line_buffering=True))
                if name == "stderr":  # unbuffered: the signal may have interrupted a buffered write
                    self.say = lambda text: raw.write(text.encode())
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and not (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                signal.signal(number, self.remember)

    def remember(self, number, frame):
        again, known = self.heard, self.signal is not None  # known: from another rank, perhaps
        self.heard, self.signal = True, self.signal or number
        if again and number == signal.SIGINT and not self.is_saving:
            raise KeyboardInterrupt
        if self.is_saving:
            self.tell("saving a checkpoint first")
        elif not known:
            self.tell(FINISHING)

    def tell(self, text):
        if self.speaks:
            self.say(f"\n{text}\n")

    def agreed(self):
        """Return the signal to stop on, None while there is none. All ranks must call this equally often, and get the
        same answer."""
        number = self.agree(self.signal)
        if number is not None and self.signal is None:
            self.signal = number
            self.tell(FINISHING)
        return number

    def check(self):
        """Raise Interrupted once a signal has come."""
        if self.agreed() is not None:
            raise Interrupted

    def watched(self, function):
        """Wrap `function` so that, once a signal has come, it is not called and Interrupted is raised instead."""
        def call(*arguments):
            self.check()
            return function(*arguments)

        return call

    def watching(self, steps):
        """Yield the same steps; raise Interrupted once a signal has come."""
        for step in steps:
            yield step
            self.check()

    @contextlib.contextmanager
    def saving(self):
        """Context manager: inside it, no Ctrl-C stops the run."""
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False


class LosableOutput(io.FileIO):
    """A stdout or stderr that, once a signal has come, drops what its reader does not take."""

    def __init__(self, stream, interruption):
        super().__init__(stream.fileno(), "w", closefd=False)
        self.stream, self.interruption = stream, interruption  # or the stream would be collected, and close the file

    def write(self, data):
        try:
            while os.name == "posix" and not select.select([], [self], [], 0.2)[1]:  # full pipe: write() would block
                if self.interruption.signal is not None:
                    return len(data)
            return super().write(data[:4096])  # a writable pipe takes this much without blocking
        except OSError:
            for _ in range(20):  # the signal that ended the reader may still reach us
                if self.interruption.signal is not None:
                    return len(data)
                time.sleep(0.05)
            raise
