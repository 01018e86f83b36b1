"""Compiling kernels, which needs no GPU, and the cache that keeps them from one start to the
next."""

import contextlib
import glob
import hashlib
import importlib.metadata
import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llmc.errors import UserError
from llmc.files import replacing

KERNEL_DIRECTORY = str(Path(__file__).absolute().parents[2] / "kernels")
INSTEAD = "with no GPU, train with: python train_gpt2.py (or train_llama3.py, train_speedrun.py)"
IMPORTING = threading.Lock()  # without it, a second thread can find cuda.core half imported


def capability(arch):
    """sm_90a -> 90, the compute capability 9.0."""
    return int(arch[3:].rstrip("a"))


class KernelFile(NamedTuple):
    """A .cu file, and how it is compiled and loaded."""

    name: str  # kernels/<name>.cu
    kernels: tuple  # their names
    constants: dict  # -D name=value
    shared: dict = {}  # kernel -> bytes of a block's dynamic shared memory


def cache_directory():
    """The directory that keeps cubins from one start to the next."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.environ.get("TRAIN_GPT2_CACHE") or os.path.join(root, "train_gpt2")
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError(f"{path}: cannot be written, for compiled kernels ({error.strerror}):"
                        " TRAIN_GPT2_CACHE=DIR names another directory") from None
    return path


def compile_kernels(name, arch, constants):
    """kernels/<name>.cu -> the bytes of a cubin for `arch` (like sm_90a); raises UserError with the
    first error."""
    path = os.path.join(KERNEL_DIRECTORY, f"{name}.cu")
    source = Path(path).read_text()
    try:
        with IMPORTING:  # here: slow to import, and not needed if the cache has all
            from cuda.core import Program, ProgramOptions
            from cuda.pathfinder import find_nvidia_header_directory
        # None, if they are not installed: NVRTC says which one is missing
        headers = KERNEL_DIRECTORY, find_nvidia_header_directory("cudart")
        macros = [(key, str(value)) for key, value in constants.items()]
        options = ProgramOptions(name=path, arch=arch, std="c++17",
                                 include_path=[*filter(None, headers)],
                                 define_macro=macros or None,
                                 split_compile=0)  # a file's kernels on all cores
        return bytes(Program(source, "c++", options).compile("cubin").code)
    except ImportError as error:
        raise UserError(f"the Python package cuda.core cannot be imported ({error}): pip install -r"
                        f" requirements-gpu.txt; {INSTEAD}") from None
    except Exception as error:  # cuda.core has an exception class for each way to fail
        lines = str(error).splitlines()
        for package, sign in (("nvidia-cuda-nvrtc", "libnvrtc"),
                              ("nvidia-cuda-runtime", 'open source file "cuda_')):
            if sign in str(error):
                raise UserError(f"the Python package {package} is missing, without which {path}"
                                " does not compile: pip install -r"
                                f" requirements-gpu.txt; {INSTEAD}") from None
        errors = (line for line in lines if "error" in line and "NVRTC_ERROR" not in line)
        first = next(errors, lines[0] if lines else repr(error))
        raise UserError(f"{path} does not compile for {arch}: {first.strip()}") from None


def compiler_version():
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return "unknown"


def prepare_kernels(arch, files):
    """Compile the files that the cache lacks, several at once; return the cubins' paths, and how
    many were compiled."""
    directory = cache_directory()
    version = compiler_version()
    sources = Path(KERNEL_DIRECTORY)
    headers = [path.read_text() for path in sorted(sources.rglob("*.cuh"))]

    def key_of(file):
        """What a cubin depends on."""
        source = (sources / f"{file.name}.cu").read_text()
        return "\n".join([version, arch, json.dumps(file.constants), source, *headers])

    def build(start, file):
        cubin = compile_kernels(file.name, arch, file.constants)
        path = f"{start}-{digest(cubin)}.cubin"
        own = f"{path}.{os.getpid()}"  # another process may be making the same file
        with replacing(own) as f:
            f.write(cubin)
        os.replace(own, path)
        return path

    starts = [os.path.join(directory, digest(key_of(file).encode())) for file in files]
    cached = list(map(find_cubin, starts))
    missing = [(start, file) for start, file, path in zip(starts, files, cached) if not path]
    with ThreadPoolExecutor(len(files)) as pool:
        built = pool.map(build, *zip(*missing))
        return [path or next(built) for path in cached], len(missing)


def digest(data):
    return hashlib.sha256(data).hexdigest()[:32]


def find_cubin(start):
    """The path of a cubin that begins so, and whose content is the one that its name says; None if
    there is none: a full disk or a copy may have cut it."""
    for path in glob.glob(f"{glob.escape(start)}-*.cubin"):
        with contextlib.suppress(OSError):
            if path == f"{start}-{digest(Path(path).read_bytes())}.cubin":
                return path
    return None
