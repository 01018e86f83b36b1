"""Errors and interruptions: an error that a user can cause is one line on stderr and an exit
status, no traceback."""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys

DIVERGED = ("the last checkpoint, if any, is kept: try a lower -l, a longer warm-up (-u) or a"
            " --grad_clip of 1 or less")  # after NaN or infinity


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that says defaults, where there is one to say."""

    def _get_help_string(self, action):
        nothing = any(action.default is value for value in ("", None, False))
        return action.help if nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line."""

    def __init__(self, doc):
        """doc: a program's docstring, whose first paragraph begins its help (-OO leaves None)."""
        super().__init__(description=(doc or "").strip().split("\n\n")[0],
                         formatter_class=Defaults)

    def error(self, message):
        self.exit(2,
                  f"{self.prog}: error: {message}; --help lists all flags, and a glob needs"
                  " quotes\n")


class UserError(Exception):
    """An error that the user can fix. The message is one line: what, found, expected, and the
    command that fixes it."""


def import_package(module, user):
    """Import and return a module that not every run needs; raises UserError that names its package
    and the `user`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{user} needs the Python package {package}: pip install {package}") from None


def run_main(main):
    """Run `main()` and exit with the status that it returns, 1 for an error that a user can cause,
    130 for Ctrl-C."""
    # a stream is None if it is closed, by `>&-` say
    sys.stdin, sys.stdout, sys.stderr = (f or open(os.devnull, "r+")
                                         for f in (sys.stdin, sys.stdout, sys.stderr))
    # a file name may not be printable
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        try:
            status = main()
        except SystemExit as end:  # --help
            status = end.code
        sys.stdout.flush()
    except BrokenPipeError:  # `... | head`
        discard_stdout()
        status = 1
    except (UserError, MemoryError, OSError, KeyboardInterrupt) as error:
        text, status = describe(error)
        print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # a full disk: Python would try again at exit, and print a traceback
            discard_stdout()
    sys.exit(status)


def describe(error):
    """Return (message, exit status) for an exception that ends a program."""
    if isinstance(error, UserError):
        return "error: " + str(error).replace("\n", "\\n"), 1  # from a file name
    if isinstance(error, MemoryError):
        return f"error: out of memory ({error or 'no details'}); try a smaller batch or model", 1
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    return f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", 1


def discard_stdout():
    """Redirect stdout to /dev/null, with its buffer, which could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Interrupted(Exception):
    """Raised after a signal, its argument, between the batches of a validation or the tokens of a
    sample."""


class Interruption:
    """Remembers Ctrl-C, SIGTERM and SIGHUP, of any rank, so that a run saves first. A second Ctrl-C
    stops at once."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.received = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # which nohup ignores
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.remember)

    def remember(self, number, frame=None):
        # as torchrun does after a second Ctrl-C
        passed_on = number == signal.SIGTERM and self.ranks.size > 1
        if (self.received and number == signal.SIGINT or self.received == signal.SIGINT
                and passed_on):
            raise KeyboardInterrupt
        is_new = self.received is None
        self.received = self.received or number
        if is_new and self.ranks.is_first:
            with contextlib.suppress(OSError):  # the terminal is closed
                # print is not reentrant
                os.write(2, b"\nfinishing this step; Ctrl-C once more to stop at once\n")

    @contextlib.contextmanager
    def output(self):
        """Context manager for printing. The terminal may be closed, or Ctrl-C have ended `| tee`:
        save all the same."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            discard_stdout()
            self.received = self.received or signal.SIGHUP

    def check(self):
        """Raise Interrupted after a signal of any rank. All ranks call this together."""
        if (number := self.ranks.largest(self.received)) is not None:
            raise Interrupted(number)

    def watching(self, steps):
        """Yield the same steps; raise Interrupted after a signal."""
        for step in steps:
            yield step
            self.check()
