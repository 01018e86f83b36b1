"""
TinyStories (https://arxiv.org/abs/2305.07759) -> GPT-2 tokens: 2.7 million short stories in simple
words, 0.9 G tokens.

    python prepro/tinystories.py              # downloads a 1.5 GB archive of 50 JSON shards, then prints three lines
        Saved ... tokens to data/TinyStories_val.bin

Shard 0 is for validation, the others for training. Each story starts with an end-of-text token; the
stories of a shard are shuffled with seed 1337 + shard, so the same archive always gives the same
files. Several processes tokenize the shards. --input DIR reads a directory of data*.json shards
that you already have.
"""

import root  # noqa: F401  (first: it finds the project)

import array
import glob
import json
import os
import random
import re
import shutil
import sys
import tarfile

import numpy as np

try:
    from huggingface_hub import HfApi, hf_hub_download, logging
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
except ImportError as error:
    sys.exit(f"tinystories.py: error: {error.name} cannot be imported: pip install -r"
             " requirements.txt")

from llmc.errors import UserError, run_main
from llmc.files import make_directory, open_input, replacing
from llmc.vocabulary import open_vocabulary, reason
from prepro.common import (add_processes, check_processes, file_hash, in_processes, make_parser,
                           progress_bar,
                           save_tokens)

REPOSITORY, ARCHIVE = "roneneldan/TinyStories", "TinyStories_all_data.tar.gz"


def fetch_shards(directory):
    """Download the archive through huggingface_hub's cache, verify it against the hub's SHA-256,
    unpack the shards."""
    logging.set_verbosity_error()  # else a line for each time that it tries again
    try:
        path = hf_hub_download(REPOSITORY, ARCHIVE, repo_type="dataset")
        # the cache names a large file by the hub's SHA-256 ...
        expected = os.path.basename(os.path.realpath(path))
        if not re.fullmatch("[0-9a-f]{64}", expected):  # ... if the file system has symbolic links
            expected = HfApi().get_paths_info(REPOSITORY, ARCHIVE,
                                              repo_type="dataset")[0].lfs.sha256
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, IndexError,
            AttributeError) as error:
        raise UserError(f"{REPOSITORY}/{ARCHIVE}: the download failed ({reason(error)}); fetch and"
                        " unpack it by other means and pass --input DIR") from None
    found = file_hash(path, "sha256")
    if found != expected:
        raise UserError(f"{path}: SHA-256 {found}, expected {expected}: the download is corrupt;"
                        " remove the file and try again")
    unpacked = f"{directory}.tmp"  # renamed when complete
    make_directory(unpacked)
    try:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile()
                       and member.name.endswith(".json")]
            with progress_bar(len(members), "unpacking", "shard") as advance:
                for member in members:
                    with replacing(os.path.join(unpacked, os.path.basename(member.name))) as f:
                        shutil.copyfileobj(archive.extractfile(member), f)
                    advance(1)
        os.rename(unpacked, directory)
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{path}: cannot be unpacked into {directory} ({reason(error)})") from None


def find_shards(directory):
    """Return the sorted data*.json shards of a directory; raises UserError if there are fewer than
    two."""
    paths = sorted(glob.glob(os.path.join(glob.escape(directory), "data*.json")))
    if len(paths) < 2:
        raise UserError(f"{directory}: {len(paths)} shards named data*.json, expected at least 2"
                        " (one validates, the rest train)")
    return paths


def tokenize_shard(job):
    """(shard number, path) -> its tokens, uint16: the stories in shuffled order, each after an
    end-of-text token. As llm.c, each split counts its shards from 0: the first one validates, and
    the second has the same seed."""
    shard, path = job
    vocabulary = open_vocabulary("gpt2")
    try:
        with open_input(path, "pass --input DIR") as f:
            stories = [entry["story"].strip() for entry in json.load(f)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: expected a JSON list of objects with a 'story' text, found:"
                        f" {error!r}") from None
    if not stories:
        raise UserError(f"{path}: no stories, expected at least one: remove the file")
    random.Random(1337 + max(0, shard - 1)).shuffle(stories)
    tokens = array.array("H")
    for story in stories:
        tokens.append(vocabulary.eot)
        tokens.extend(vocabulary.encode(story))
    return np.array(tokens)


def main():
    parser = make_parser(__doc__, os.path.join("data", "TinyStories"))
    parser.add_argument("--input", metavar="DIR",
                        help="directory of data*.json shards, instead of the download")
    add_processes(parser, "shards")
    args = parser.parse_args()
    check_processes(args)

    directory = args.input
    if directory is None:
        directory = f"{args.output}_shards"
        if not os.path.isdir(directory):
            fetch_shards(directory)
    paths = find_shards(directory)
    # download the vocabulary once, and fail here, before the processes start
    vocabulary = open_vocabulary("gpt2")
    jobs = in_processes(tokenize_shard, enumerate(paths), min(args.processes, len(paths)))
    shards = []
    with progress_bar(len(paths), "tokenizing", "shard") as advance:
        for tokens in jobs:
            shards.append(tokens)
            advance(1)
    save_tokens(shards[:1], shards[1:], vocabulary, args)


if __name__ == "__main__":
    run_main(main)
