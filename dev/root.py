"""Where the project is, and what its programs print. A program of dev/ imports this before the project's modules and
NumPy, and so finds them."""

import os
import shlex
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

from llmc.errors import UserError


def output_of(command, **options):
    """Return what a command prints; raises UserError if it fails. options: of subprocess.run."""
    done = subprocess.run([str(word) for word in command], capture_output=True, encoding="utf-8",
                          errors="replace", **options)
    if done.returncode:
        raise UserError(f"{shlex.join(done.args)} failed:\n{done.stderr.strip()}")
    return done.stdout
