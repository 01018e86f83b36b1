"""Errors and interruptions: what a user can cause ends as one line on stderr and an exit status, never a traceback."""

import contextlib
import io
import os
import select
import signal
import sys
import threading
import time
import traceback

DIVERGED = "try a lower -l, a warm-up (-u) or --grad_clip 1"  # what mends a loss that is not finite


class UserError(Exception):
    """Something that the user can mend. The message is one line: what, found, expected, and the mending command."""


def run_main(main):
    """Run `main()` and exit with its status: 0 or what it returns, 1 for what a user can cause, 130 after Ctrl-C."""
    program = os.path.basename(sys.argv[0])
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as quiet_imports left it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = interrupt_again
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed
            setattr(sys, name, open(os.devnull, "w"))
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # no terminal knows every letter of a name
    try:
        try:
            status = main()
        except SystemExit as done:  # argparse's, after --help, say
            status = done.code
        sys.stdout.flush()  # not at the interpreter's end, where a fault is not ours to report: `--help | true`
        sys.exit(status)
    except (UserError, MemoryError) as error:
        text, _ = describe(error)
        sys.exit(f"{program}: {text}")
    except (KeyboardInterrupt, OSError) as error:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # it ends already: the next one, at once
        text, status = describe(error)
        begin = "\n" if isinstance(error, KeyboardInterrupt) else ""  # after the terminal's ^C
        if text:
            with contextlib.suppress(OSError):  # in `... | tee log`, Ctrl-C ends tee too
                print(f"{begin}{program}: {text}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def interrupt_again(lost):
    """Ctrl-C while a destructor runs, whose exceptions Python only prints: let it come again, a moment later."""
    if lost.exc_type is KeyboardInterrupt:
        if not sys.is_finalizing():  # when it ends already, and no thread begins any more
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


def describe(error):
    """(what to say of it, or None; exit status) of an exception that ends a program."""
    if isinstance(error, UserError):
        return "error: " + str(error).replace("\n", "\\n"), 1  # of a name
    if isinstance(error, MemoryError):
        return f"error: out of memory ({error or 'no details'}); try a smaller batch or model", 1
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, BrokenPipeError):  # `... | head`, which nobody needs to hear about
        return None, 1
    if isinstance(error, OSError):
        where = error.filename or stdout_fails() and "standard output"
        return f"error: {f'{where}: ' if where else ''}{error.strerror or error}", 1
    if isinstance(error, SystemExit):
        return (None, error.code or 0) if isinstance(error.code, int | None) else (error.code, 1)
    return "".join(traceback.format_exception(error)).rstrip(), 1


def stdout_fails():
    """Whether nothing can be written to it, not even nothing."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
        return False
    except OSError:
        return True


def quiet_imports():
    """Let Ctrl-C end our programs without a traceback until run_main takes over. (Others, pytest say, are left alone.)
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    main = sys.modules.get("__mp_main__", sys.modules["__main__"])  # the former in a process that a program started
    program = os.path.abspath(getattr(main, "__file__", None) or root)
    ours = [os.path.join(root, *names) for names in ((), ("dev",), ("dev", "kernels"))]
    if os.path.dirname(program) in ours and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


FINISHING = "finishing this step; Ctrl-C once more to stop at once"


class Interrupted(Exception):
    """Raised between the batches of a validation, or the tokens of a sample, once a signal has come."""


class Interruption:
    """Remembers Ctrl-C, SIGTERM and SIGHUP (unless nohup has it ignored), so that a run can save and stop at the next
    safe point. A second Ctrl-C stops at once, except while a checkpoint is being saved.

    stdout and stderr may then have lost their readers: in `python train_gpt2.py 2>&1 | tee log`, Ctrl-C ends tee too.
    """

    def __init__(self, agree=None, speaks=True):
        """For a rank of a run on several GPUs, agree: function that makes of this process's signal that of all, as
        Ranks.largest does; speaks: whether this is the one to say what is going on."""
        self.signal, self.is_saving, self.say = None, False, sys.stderr.write
        self.agree, self.speaks, self.heard = agree or (lambda number: number), speaks, False
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            stream.flush()
            with contextlib.suppress(io.UnsupportedOperation):  # a notebook's is no file
                raw = LosableOutput(stream, self)
                wrapper = type(stream) if isinstance(stream, io.TextIOWrapper) else io.TextIOWrapper
                setattr(sys, name, wrapper(io.BufferedWriter(raw), stream.encoding, stream.errors,
                                           line_buffering=True))
                if name == "stderr":  # past the buffer, which what a signal interrupts may be about to fill
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
        """The signal by which to stop, None as long as there is none. All ranks of a run ask equally often, and get the
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
        """`function`, which once a signal has come raises Interrupted instead of being called."""
        def call(*arguments):
            self.check()
            return function(*arguments)

        return call

    def watching(self, steps):
        """The same steps, until a signal has come: then it raises Interrupted."""
        for step in steps:
            yield step
            self.check()

    @contextlib.contextmanager
    def saving(self):
        """While this lasts, no Ctrl-C stops the run."""
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False


class LosableOutput(io.FileIO):
    """A stdout or stderr that, once a signal has come, drops what its reader does not take."""

    def __init__(self, stream, interruption):
        super().__init__(stream.fileno(), "w", closefd=False)
        self.stream, self.interruption = stream, interruption  # the stream would close the file if it were collected

    def write(self, data):
        try:
            while os.name == "posix" and not select.select([], [self], [], 0.2)[1]:  # a full pipe: write() would wait
                if self.interruption.signal is not None:
                    return len(data)
            return super().write(data[:4096])  # what a pipe takes at once
        except OSError:
            for _ in range(20):  # the signal that ended the reader is perhaps on its way to us
                if self.interruption.signal is not None:
                    return len(data)
                time.sleep(0.05)
            raise
