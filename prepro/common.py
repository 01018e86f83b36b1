"""
What the prepro programs share: verified downloads, worker processes, and the files that most of
them write, PREFIX_train.bin, PREFIX_val.bin and PREFIX_tokenizer.bin, the vocabulary.

Not a program: run prepro_text.py, prepro/fineweb.py, prepro/hellaswag.py or one of the others.
"""

import argparse
import collections
import contextlib
import glob
import hashlib
import multiprocessing
import os
import shlex
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from llmc.dataloader import find_files, weights_beside, write_tokens
from llmc.errors import Parser, UserError, import_package
from llmc.files import all_or_none, chunks, make_directory, open_input, replacing
from llmc.threads import THREADS
from llmc.vocabulary import reason, save_vocabulary

TIMEOUT_SECONDS = 30  # of silence from the server


@contextlib.contextmanager
def progress_bar(total, what, unit):
    """Yield advance(count), which moves a progress bar on stderr. Without tqdm, that is a line a
    second or, if stderr is no terminal, a line in half a minute."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if not tqdm or not sys.stderr.isatty():
        begin, end, every = ("\r", "", 1) if sys.stderr.isatty() else ("", "\n", 30)
        shown = time.monotonic()
        done = 0

        def advance(count):
            nonlocal shown, done
            done += count
            if time.monotonic() >= shown + every:
                shown = time.monotonic()
                print(f"{begin}{what}: {done} of {total or '?'} {unit}", end=end, file=sys.stderr,
                      flush=True)

        yield advance
        if begin:
            print("\r\x1b[K", end="", file=sys.stderr)  # erases the line
        return
    with tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B") as bar:
        yield bar.update
        bar.total = bar.n  # not all that was expected had to be read


def download(url, path, digest, algorithm="md5"):
    """Download a URL to `path` with a progress bar, unless a file with that MD5 or SHA-256 is
    already there.

    Raises UserError that names the URL, the reason and --input. Never overwrites a file or leaves
    half of one.
    """
    kind = {"md5": "MD5", "sha256": "SHA-256"}[algorithm]
    if os.path.lexists(path):
        read_input(path)  # raises if it cannot be read
        found = file_hash(path, algorithm)
        if found != digest:
            raise UserError(f"{path}: {kind} {found}, expected {digest}: another file is where the"
                            " download goes; move it away, or tokenize it with --input"
                            f" {shlex.quote(path)}")
        return
    requests = import_package("requests", "a download")
    found = hashlib.new(algorithm)
    try:
        with requests.get(url, stream=True, timeout=TIMEOUT_SECONDS) as response:
            response.raise_for_status()
            make_directory(os.path.dirname(path))
            size = int(response.headers.get("Content-Length", 0)) or None
            with replacing(path) as f, progress_bar(size, os.path.basename(path), "B") as advance:
                for piece in response.iter_content(1 << 16):
                    f.write(piece)
                    found.update(piece)
                    advance(len(piece))
                if found.hexdigest() != digest:
                    raise UserError(f"{url}: {kind} {found.hexdigest()}, expected {digest}: the"
                                    " download is corrupt or the text has changed; try again, or"
                                    " pass a good copy with --input FILE")
    except requests.RequestException as error:
        raise UserError(f"{url}: the download failed ({reason(error)}); fetch it by other means"
                        " and pass --input FILE") from None


def file_hash(path, algorithm):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, algorithm).hexdigest()


def read_input(path):
    """Return the bytes of a text file; raises UserError if it cannot be read."""
    with open_input(path, "pass --input FILE") as f:
        return f.read()


def output_paths(output):
    """The paths that start with PREFIX: validation tokens, training tokens, vocabulary."""
    return [f"{output}_{name}.bin" for name in ("val", "train", "tokenizer")]


def training_shards(output):
    """The sorted files that have names of training shards of PREFIX."""
    return find_files(f"{glob.escape(output)}_train_*.bin")


def check_leftovers(args):
    """Raise UserError where an earlier text's tokens would stay, beside the new one's vocabulary: a
    file of all where there will be shards, or shards where there will be one."""
    others = training_shards(args.output)
    if args.shard_tokens:
        others = [path for path in output_paths(args.output)[:-1] if os.path.lexists(path)]
    if others:
        raise UserError(f"{others[0]}: of an earlier text, would stay beside the new vocabulary:"
                        " remove it, or pass another --output")


def check_not_written_over(texts, outputs):
    """Raise UserError if one of the paths to be written, `outputs`, is an input."""
    outputs = set(map(os.path.realpath, outputs))
    for path in texts:
        if os.path.realpath(path) in outputs:
            raise UserError(f"{path}: is the text itself, and would be overwritten: pass another"
                            " --output")


def in_processes(function, jobs, processes, prepare=None, arguments=()):
    """Yield function(job) for each job, in order, from `processes` workers, which call
    prepare(*arguments) first.

    Reads only as many jobs ahead as keep the workers busy. Raises UserError if one of them is
    killed.
    """
    if processes == 1:
        if prepare:
            prepare(*arguments)
        yield from map(function, jobs)
        return
    workers = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), begin_worker,
                                  (prepare, arguments))
    waiting = collections.deque()
    try:
        for job in jobs:
            waiting.append(workers.submit(function, job))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(f"--processes {processes}: one of them was killed, perhaps out of memory:"
                        " pass fewer") from None
    finally:
        workers.shutdown(cancel_futures=True)


def begin_worker(prepare, arguments):
    threading.Thread(target=end_with_parent, daemon=True).start()
    if prepare:
        prepare(*arguments)


def end_with_parent():
    """End this process when its parent ends, even if the parent was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def evenly(numbers):
    """The numbers (n,) in an order of which every first part is from all over: by their multiples
    of the golden ratio, modulo 2^32."""
    return numbers[np.argsort(numbers.astype(np.uint32) * np.uint32(2654435769), kind="stable")]


def save_tokens(val, train, vocabulary, args):
    """Write PREFIX_val.bin, PREFIX_train.bin and the vocabulary. val, train: lists of integer
    arrays."""
    save_files(dict(zip(output_paths(args.output), (val, train))), vocabulary, args)


def save_files(files, vocabulary, args, text_bytes=None, weights=None, row=0):
    """Write token files, {path: list of integer arrays}, and the vocabulary, all or none; print
    their sizes. text_bytes, row: see write_tokens, {path: number} and a number; weights: {path: (n,)
    uint8}, of the tokens as targets; without, earlier files of weights are removed."""
    if args.format == "uint16" and len(vocabulary.tokens) > 1 << 16:
        args.format = "uint32"
    tokenizer = output_paths(args.output)[-1]
    make_directory(os.path.dirname(args.output))
    counts = {path: sum(map(len, pieces)) for path, pieces in files.items()}
    with all_or_none():
        for path, pieces in files.items():
            write_tokens(path, pieces, counts[path], args.format, (text_bytes or {}).get(path, 0),
                         row)
            if weights:
                with replacing(weights_beside(path)) as f:
                    f.write(weights[path])
        save_vocabulary(tokenizer, vocabulary)
    for path in () if weights else files:
        Path(weights_beside(path)).unlink(missing_ok=True)
    for path, count in counts.items():
        print(f"Saved {count} tokens to {path}")
    print(f"Saved the vocabulary of {len(vocabulary.tokens)} tokens to {tokenizer}")


def add_processes(parser, what):
    parser.add_argument("--processes", type=int, metavar="N", default=THREADS,
                        help=f"{what} tokenized at a time")


def check_processes(args):
    if args.processes < 1:
        raise UserError(f"--processes {args.processes}: expected at least 1")


def add_val_fraction(parser, most, least=1e-12):
    def fraction(text):
        value = float(text)
        if not least <= value < 1.0:
            raise UserError(f"--val_fraction {value}: expected more than 0 and less than 1")
        return value

    parser.add_argument("--val_fraction", type=fraction, metavar="X", default=argparse.SUPPRESS,
                        help=f"fraction of the tokens for validation (default: 0.1, at most {most}"
                        " tokens)")


def val_tokens(count, most, args):
    """Return the number of validation tokens out of `count`: --val_fraction of them; without that
    flag a tenth, at most `most`. Raises UserError if either validation or training would get
    none."""
    fraction = getattr(args, "val_fraction", None)
    val = min(count // 10, most) if fraction is None else int(count * fraction + 1e-6)
    if not 0 < val < count:
        raise UserError(f"{count} tokens of text, of which {val} for validation, expected at least"
                        " one for validation and one for training: pass more text, or another"
                        " --val_fraction")
    return val


def save_split(tokens, most, vocabulary, args):
    """Write the first val_tokens(...) tokens for validation, the rest for training, and the
    vocabulary."""
    tokens = np.asarray(tokens)
    val = val_tokens(len(tokens), most, args)
    save_tokens(list(chunks(tokens[:val])), list(chunks(tokens[val:])), vocabulary, args)


def make_parser(description, output, format="int32"):
    """Return a parser with --format and --output, for the scripts that write PREFIX_train.bin and
    so on."""
    parser = Parser(description)
    parser.add_argument("--format", choices=("int32", "uint16"), default=format,
                        help="int32: llm.c of April 2024; uint16: with a header, llm.c of today"
                        " (uint32, as its Llama branch has it, for vocabularies of more than"
                        " 65,536 tokens)")
    parser.add_argument("--output", metavar="PREFIX", default=output,
                        help="files are named PREFIX_train.bin, PREFIX_val.bin and"
                        " PREFIX_tokenizer.bin")
    return parser
