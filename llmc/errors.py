"""Errors and interruptions: what a user can cause ends as one line on stderr and an exit status, never a traceback."""

import io
import os
import signal
import sys

DIVERGED = "try a lower -l, a warm-up (-u) or --grad_clip 1"  # what mends a loss that is not finite


class UserError(Exception):
    """Something that the user can mend. The message is one line: what, found, expected, and the mending command."""


def run_main(main):
    """Run `main()` and exit with its status: 0 or what it returns, 1 for what a user can cause, 130 after Ctrl-C."""
    program = os.path.basename(sys.argv[0])
    if sys.stdout is None:  # started with stdout closed
        sys.stdout = open(os.devnull, "w")
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal need not know every letter of a name or a sample
    try:
        try:
            status = main()
        except SystemExit as done:  # argparse's, after --help, say
            status = done.code
        sys.stdout.flush()  # not at the interpreter's end, where a fault is not ours to report: `--help | true`
        sys.exit(status)
    except UserError as error:
        line = str(error).replace("\n", "\\n")  # of a name
        sys.exit(f"{program}: error: {line}")
    except MemoryError as error:
        sys.exit(f"{program}: error: out of memory ({error or 'no details'}); try a smaller -b, -t or model")
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # that is `... | head`, which nobody needs to hear about
            where = error.filename or stdout_fails() and "standard output"
            where = f"{where}: " if where else ""
            print(f"{program}: error: {where}{error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        sys.exit(1)


def stdout_fails():
    """Whether nothing can be written to it, not even nothing."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
        return False
    except OSError:
        return True


class Interruption:
    """Remembers Ctrl-C and SIGTERM, so that the step at hand is finished first. A second Ctrl-C stops at once."""

    def __init__(self):
        self.signal = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.remember)

    def remember(self, number, frame):
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        stdout = LostReader(sys.stdout.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(stdout), line_buffering=True)
        print("\nfinishing this step; once more to stop at once", file=sys.stderr)


class LostReader(io.FileIO):
    """A stdout that may lose its reader: in `python train_gpt2.py | tee log`, Ctrl-C ends tee before we have saved."""

    def write(self, data):
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)
