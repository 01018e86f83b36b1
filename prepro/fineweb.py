"""
FineWeb (https://arxiv.org/abs/2406.17557), 10 or 100 billion tokens of web text -> GPT-2 tokens, in llm.c's shards.

    python prepro/fineweb.py --shards 10      # downloads the first 1.1 billion tokens, ready-made, 2.2 GB; prints:
        kjj0/fineweb10B-gpt2: 11 shards, 11 to download, about 2.2 GB to write; data/fineweb10B has 60.3 GB free
        Saved 100000000 tokens to data/fineweb10B/fineweb_val_000000.bin
        ...
    python train_gpt2_cuda.py -e d12 -i "data/fineweb10B/fineweb_train_*.bin"

    python prepro/fineweb.py --edu --size 100B           # FineWeb-Edu: educational pages
    python prepro/fineweb.py --parquet                   # the text itself, 28 GB, tokenized here on all cores
    python prepro/fineweb.py --input "my_text/*.parquet" --output data/mine

A shard holds 100 million tokens, uint16; the first is for validation, the others for training. Each document starts
with an end-of-text token and continues in the next shard when one is full. The ready-made shards on Hugging Face were
made by others from the same text; each is verified against the hub's SHA-256. A shard appears whole or not at all, so
after an interruption the same command resumes. --parquet needs the Python package pyarrow.
"""

import root  # noqa: F401  (first: it finds the project)

import argparse
import json
import math
import os
import re
import shutil
import sys
from typing import NamedTuple

import numpy as np

try:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.hf_api import RepoFile
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"fineweb.py: error: {error.name} cannot be imported: pip install -r requirements.txt")

from llmc.dataloader import find_files, open_tokens, write_tokens
from llmc.errors import Parser, UserError, run_main
from llmc.files import (HEADER_BYTES, errors_of_writing, locked, make_directory, open_input, replacing)
from llmc.vocabulary import open_vocabulary, reason, save_vocabulary
from prepro.common import add_processes, check_processes, file_hash, in_processes

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    parquet = None

READY_MADE = {  # (edu, size) -> the hub's dataset of token shards
    (False, "10B"): "kjj0/fineweb10B-gpt2",
    (False, "100B"): "kjj0/fineweb100B-gpt2",
    (True, "10B"): "kjj0/finewebedu10B-gpt2",
    (True, "100B"): "karpathy/fineweb-edu-100B-gpt2-token-shards",
}
TEXT = {False: "HuggingFaceFW/fineweb", True: "HuggingFaceFW/fineweb-edu"}  # with folders sample/10BT, sample/100BT
SHARD_NAME = re.compile(r"(?:.*_)?(val|train)_(\d{6})\.bin")
SHARD_TOKENS = 10**8
TOKEN_BYTES = 0.75  # bytes of tokens per byte of FineWeb's parquet: 20.6 GB from 28 GB
DOCUMENTS = 256  # tokenized by a process at a time
RESUME = "the same command resumes from here"

# ----------------------------------------------------------------------------------------------------------------------
# shards on this disk


class Output(NamedTuple):
    """Where the shards go and what they are called."""

    directory: str
    name: str  # fineweb or edu_fineweb

    def path(self, number):
        """Return the path of shard `number`; shard 0 is for validation."""
        return os.path.join(self.directory, f"{self.name}_{'train' if number else 'val'}_{number:06d}.bin")

    def has(self, number, size):
        """Whether shard `number` exists with `size` bytes; a shard gets its name only when it is complete."""
        path = self.path(number)
        return os.path.isfile(path) and os.path.getsize(path) == size


def shard_bytes(tokens):
    return HEADER_BYTES + 2 * tokens


def check_room(what, directory, needed):
    """Print how much will be written and how much disk is free; raises UserError if that is not enough."""
    free = shutil.disk_usage(directory).free
    print(f"{what}, about {gigabytes(needed)} to write; {directory} has {gigabytes(free)} free")
    if needed > free:
        raise UserError(f"{directory}: {gigabytes(needed)} needed, {gigabytes(free)} free: pass a smaller --shards N,"
                        " or another --output")


def gigabytes(size):
    return f"{size / 1e9:.1f} GB"


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face


def list_files(repository, folder=None):
    """Return the files of a dataset as huggingface_hub's RepoFiles; raises UserError if they cannot be listed."""
    try:
        tree = HfApi().list_repo_tree(repository, folder, repo_type="dataset")
        return [file for file in tree if isinstance(file, RepoFile)]
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{repository}: cannot be listed ({reason(error)}); try again, or fetch it by other means and"
                        " pass --input FILES") from None


def fetch(repository, file, directory):
    """Download a RepoFile into `directory`, unless it exists; returns its path.

    huggingface_hub resumes a broken connection a few times. If the SHA-256 is not the hub's, the file is removed and
    UserError raised.
    """
    try:
        path = hf_hub_download(repository, file.path, repo_type="dataset", local_dir=directory)
    except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{repository}/{file.path}: the download failed ({reason(error)}); {RESUME}") from None
    found = file_hash(path, "sha256")
    if file.lfs is None or found != file.lfs.sha256:
        os.unlink(path)
        expected = file.lfs.sha256 if file.lfs else "one that the hub has on record"
        raise UserError(f"{repository}/{file.path}: SHA-256 {found}, expected {expected}: the download is corrupt;"
                        f" {RESUME}")
    return path


def fetch_shards(repository, output, most):
    """Download the validation shard and the first `most` training shards (None: all), except those that exist."""
    if os.path.exists(notes_path(output)):
        raise UserError(f"{output.directory}: its shards are made from parquet: pass another --output, or the flags of"
                        " the first run")
    files = {int(match[2]): file for file in list_files(repository) if (match := SHARD_NAME.fullmatch(file.path))}
    numbers = sorted(files)[: None if most is None else most + 1]
    if not numbers or numbers[0] != 0:
        raise UserError(f"{repository}: holds no shards named like fineweb_val_000000.bin: pass --parquet")
    missing = [number for number in numbers if not output.has(number, files[number].size)]
    needed = sum(files[number].size for number in missing)
    check_room(f"{repository}: {len(numbers)} shards, {len(missing)} to download", output.directory, needed)
    directory = os.path.join(output.directory, ".download")
    for number in missing:
        fetched, path = fetch(repository, files[number], directory), output.path(number)
        count = len(open_tokens(fetched, 50257))
        move(fetched, path)
        print(f"Saved {count} tokens to {path}")
    shutil.rmtree(directory, ignore_errors=True)


def move(source, path):
    """Flush `source` to disk, then rename it to `path`."""
    with errors_of_writing(path):
        with open(source, "rb") as f:
            os.fsync(f.fileno())
        os.replace(source, path)


# ----------------------------------------------------------------------------------------------------------------------
# parquet


class Source(NamedTuple):
    """A parquet file, local or on the hub."""

    name: str
    size: int
    open: object  # () -> its local path, downloading it if necessary
    close: object  # () -> None, called once its text is in shards


def local_sources(pattern):
    paths = find_files(pattern)
    if not paths:
        raise UserError(f"--input {pattern}: no file matches")
    for path in paths:
        open_parquet(path)  # fail now if it is not one
    return [Source(os.path.basename(path), os.path.getsize(path), lambda path=path: path, lambda: None)
            for path in paths]


def hub_sources(repository, folder, directory):
    files = sorted((file for file in list_files(repository, folder) if file.path.endswith(".parquet")),
                   key=lambda file: file.path)
    if not files:
        raise UserError(f"{repository}/{folder}: holds no parquet files")

    def remove(file):
        path = os.path.join(directory, file.path)
        if os.path.exists(path):
            os.unlink(path)

    return [Source(file.path, file.size, lambda file=file: fetch(repository, file, directory),
                   lambda file=file: remove(file)) for file in files]


def open_parquet(path):
    """Open a ParquetFile; raises UserError if it is not one or has no column 'text' of strings."""
    try:
        with open_input(path, "pass parquet files with a column 'text'"):
            file = parquet.ParquetFile(path)
        kind = file.schema_arrow.field("text").type
        if kind not in (pyarrow.string(), pyarrow.large_string()):
            raise UserError(f"{path}: its column 'text' is of {kind}, expected strings")
        return file
    except KeyError:
        found = ", ".join(file.schema_arrow.names)
        raise UserError(f"{path}: has columns {found}, expected 'text' among them") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a parquet file ({reason(error)})") from None


def read_texts(path, row):
    """Yield (first row, [text]) for DOCUMENTS rows at a time, from `row` on; holds at most a row group in memory."""
    file = open_parquet(path)
    first = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if first + count > row:
            try:
                for batch in file.iter_batches(DOCUMENTS, [group], ["text"]):
                    texts = batch.column(0).to_pylist()
                    skipped = max(0, row - first)
                    if texts[skipped:]:
                        yield first + skipped, texts[skipped:]
                    first += len(texts)
            except (OSError, pyarrow.ArrowException) as error:
                raise UserError(f"{path}: row group {group} cannot be read ({reason(error)})") from None
        else:
            first += count


def jobs(sources, position):
    """Yield (file, row, [text]) from `position` on, which is (file, row, tokens of that row already used)."""
    for number in range(position[0], len(sources)):
        for row, texts in read_texts(sources[number].open(), position[1] if number == position[0] else 0):
            yield number, row, texts


def tokenize(job):
    """(file, row, [text]) -> (file, row, uint16 tokens, the end of each document in them)."""
    file, row, texts = job
    vocabulary = open_vocabulary("gpt2")
    tokens, ends = [], []
    for text in texts:
        tokens.append(vocabulary.eot)
        tokens += vocabulary.encode(text or "")
        ends.append(len(tokens))
    return file, row, np.array(tokens, np.uint16), ends


def shards_from(sources, position, size, processes, bar):
    """Yield (tokens, position where the next shard begins) for each shard of `size` tokens; the last may be shorter.

    Raises UserError if all of the text is in the first shard, so that none is for training.
    """
    shard, used = np.empty(size, np.uint16), 0
    begin = position[2]  # in the first job's tokens; those before it are in a shard already
    for file, row, tokens, ends in in_processes(tokenize, jobs(sources, position), processes):
        while begin < len(tokens):
            if used == size:  # and there is text for another shard
                document = int(np.searchsorted(ends, begin, side="right"))
                position = [file, row + document, begin - (ends[document - 1] if document else 0)]
                yield shard, position
                used = 0
            count = min(len(tokens) - begin, size - used)
            shard[used : used + count] = tokens[begin : begin + count]
            begin, used = begin + count, used + count
            bar.update(count)
        begin = 0
    if position == [0, 0, 0]:
        raise UserError(f"{used} tokens of text, expected more than the {size} of the validation shard: pass more text,"
                        " or a smaller --shard_tokens")
    if used:
        yield shard[:used], [len(sources), 0, 0]


def tokenize_shards(sources, output, most, args):
    """Make the validation shard and the first `most` training shards (None: all), except those that exist.

    parquet.json beside them has each shard's number of tokens and the position in the text where the next one begins.
    """
    size, path = args.shard_tokens, notes_path(output)
    notes = {"shard_tokens": size, "files": [[source.name, source.size] for source in sources], "shards": []}
    read_notes(path, notes, output)
    shards = notes["shards"]  # [[tokens, file, row, tokens of that row], ...]
    number = next((i for i, (count, *_) in enumerate(shards) if not output.has(i, shard_bytes(count))), len(shards))
    del shards[number:]
    position = shards[-1][1:] if shards else [0, 0, 0]
    last = most if most is not None else math.inf
    finished = number > last or position[0] == len(sources)

    text = sum(source.size for source in sources)
    tokens = min(TOKEN_BYTES / 2 * text, size * (last + 1))
    needed = 0 if finished else 2 * (tokens - sum(count for count, *_ in shards))
    largest = 0 if args.input or finished else max(source.size for source in sources)  # one is on disk at a time
    check_room(f"{len(sources)} parquet files of {gigabytes(text)}, {number} shards done",
               output.directory, max(0, needed) + largest)
    if finished:
        return
    processes = min(args.processes, 1 + text // (4 << 20))  # starting one takes as long as tokenizing a few megabytes
    with tqdm(total=None if args.input else int(tokens), unit="token", unit_scale=True, desc="tokenizing",
              initial=size * number, disable=None) as bar:
        for tokens, after in shards_from(sources, position, size, processes, bar):
            if not number:  # first, so that the shards' source is recorded
                write_notes(path, notes)
            write_tokens(output.path(number), [tokens], len(tokens), "uint16")
            shards.append([len(tokens), *after])
            write_notes(path, notes)
            bar.write(f"Saved {len(tokens)} tokens to {output.path(number)}")
            for source in sources[: after[0]]:
                source.close()
            number += 1
            if number > last:
                break
        bar.total = bar.n  # which was an estimate


def notes_path(output):
    return os.path.join(output.directory, "parquet.json")


def read_notes(path, notes, output):
    """Fill in notes["shards"] from an earlier run's file; raises UserError if its text or shard size differs."""
    if not os.path.exists(path):
        if os.path.exists(output.path(0)):
            raise UserError(f"{output.path(0)}: was not made from parquet here, and would be overwritten: pass another"
                            " --output")
        return
    try:
        with open_input(path, REMOVE) as f:
            found = json.load(f)
        same = all(found[name] == notes[name] for name in ("shard_tokens", "files"))
        shards = [[int(number) for number in shard] for shard in found["shards"]]
        if any(len(shard) != 4 or min(shard) < 0 for shard in shards):
            raise ValueError(f"shards {shards}")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error!r}); {REMOVE}") from None
    if not same:
        raise UserError(f"{path}: its shards are from other parquet files, or of another --shard_tokens: pass the"
                        " flags of the first run, or another --output")
    notes["shards"] = shards


REMOVE = "remove it, and the shards beside it, to start over"


def write_notes(path, notes):
    with replacing(path) as f:
        f.write(json.dumps(notes).encode())


# ----------------------------------------------------------------------------------------------------------------------
# main


def parse_arguments():
    parser = Parser(description=(__doc__ or "").strip().split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu")
    parser.add_argument("--size", choices=("10B", "100B"), default="10B", help="number of tokens of the dataset")
    parser.add_argument("--shards", type=int, metavar="N", default=argparse.SUPPRESS,
                        help="the first N training shards, and the validation shard (default: all)")
    parser.add_argument("--parquet", action="store_true", help="tokenize the text here, instead of ready-made shards")
    parser.add_argument("--input", metavar="FILES", default=argparse.SUPPRESS,
                        help="local parquet files, a path or a quoted glob; implies --parquet")
    parser.add_argument("--shard_tokens", type=int, metavar="N", default=argparse.SUPPRESS,
                        help=f"--parquet: tokens of a shard (default: {SHARD_TOKENS})")
    add_processes(parser, "--parquet: pieces of text")
    parser.add_argument("--output", metavar="DIR", default=argparse.SUPPRESS,
                        help="directory of the shards (default: data/fineweb10B, data/edu_fineweb100B and so on)")
    args = parser.parse_args()
    check_processes(args)
    args.input = getattr(args, "input", None)
    args.parquet = args.parquet or args.input is not None
    if not args.parquet and hasattr(args, "shard_tokens"):
        raise UserError(f"--shard_tokens {args.shard_tokens}: ready-made shards have a fixed size: add"
                        " --parquet")
    args.shard_tokens = getattr(args, "shard_tokens", SHARD_TOKENS)
    args.shards = getattr(args, "shards", None)
    for name, least in (("shards", 1), ("shard_tokens", 1)):
        if (value := getattr(args, name)) is not None and not least <= value < 2**31:
            raise UserError(f"--{name} {value}: expected at least {least}, and less than 2^31")
    return args


def main():
    args = parse_arguments()
    name = "edu_fineweb" if args.edu else "fineweb"
    output = Output(getattr(args, "output", os.path.join("data", f"{name}{args.size}")), name)
    if args.parquet and parquet is None:
        raise UserError("the Python package pyarrow, which reads parquet, cannot be imported: pip install pyarrow")
    vocabulary = open_vocabulary("gpt2")  # download the vocabulary once, and fail here, before the processes start
    make_directory(output.directory)
    with locked(output.directory, "--output"):
        if args.parquet:
            downloads = os.path.join(output.directory, ".download")
            sources = (local_sources(args.input) if args.input is not None else
                       hub_sources(TEXT[args.edu], f"sample/{args.size}T", downloads))
            tokenize_shards(sources, output, args.shards, args)
            shutil.rmtree(downloads, ignore_errors=True)
        else:
            fetch_shards(READY_MADE[args.edu, args.size], output, args.shards)
        save_vocabulary(os.path.join(output.directory, f"{name}_tokenizer.bin"), vocabulary)


if __name__ == "__main__":
    run_main(main)
