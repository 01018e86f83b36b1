"""
FineWeb (https://arxiv.org/abs/2406.17557), 10 or 100 billion tokens of web text, in llm.c's shards.

    python prepro/fineweb.py --shards 10      # downloads the first 1.1 billion tokens, 2.2 GB; prints:
        kjj0/fineweb10B-gpt2: 11 shards, 11 to download, about 2.2 GB to write; data/fineweb10B has
        60.3 GB free
        Saved 100000000 tokens to data/fineweb10B/fineweb_val_000000.bin
        ...
    python train_gpt2_cuda.py -e d12 -i "data/fineweb10B/fineweb_train_*.bin"

    python prepro/fineweb.py --edu --size 100B           # FineWeb-Edu: educational pages

A shard holds 100 million GPT-2 tokens, uint16; the first is for validation, the others for
training. They were made by others of FineWeb's text, and are verified against the SHA-256 that
Hugging Face has on record. A shard appears whole or not at all, so after an interruption the same
command resumes. To tokenize the text itself, with any vocabulary, give its Parquet files to
prepro_text.py.
"""

import root  # noqa: F401  (first: it finds the project)

import argparse
import os
import re
import shutil

from llmc.dataloader import open_tokens
from llmc.errors import Parser, UserError, import_package, run_main
from llmc.files import errors_of_writing, locked, make_directory
from llmc.vocabulary import open_vocabulary, reason, save_vocabulary
from prepro.common import file_hash

REPOSITORIES = {  # (edu, size) -> the hub's dataset of token shards
    (False, "10B"): "kjj0/fineweb10B-gpt2",
    (False, "100B"): "kjj0/fineweb100B-gpt2",
    (True, "10B"): "kjj0/finewebedu10B-gpt2",
    (True, "100B"): "karpathy/fineweb-edu-100B-gpt2-token-shards",
}
SHARD_NAME = re.compile(r"(?:.*_)?(val|train)_(\d{6})\.bin")
RESUME = "the same command resumes from here"


def list_shards(hub, repository):
    """{number: huggingface_hub's RepoFile} of a dataset's shards; raises UserError if they cannot
    be listed."""
    try:
        files = [*hub.HfApi().list_repo_tree(repository, repo_type="dataset")]
    except (hub.errors.HTTPError, hub.errors.OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{repository}: cannot be listed ({reason(error)}); try again") from None
    shards = {int(match[2]): file for file in files if (match := SHARD_NAME.fullmatch(file.path))}
    if 0 not in shards:
        raise UserError(f"{repository}: holds no shards named like fineweb_val_000000.bin")
    return shards


def fetch(hub, repository, file, directory):
    """Download a RepoFile into a directory, and return its path. The package resumes a broken
    connection a few times. Raises UserError if it stays broken or, without the file, if the SHA-256
    is not the hub's."""
    name = f"{repository}/{file.path}"
    try:
        path = hub.hf_hub_download(repository, file.path, repo_type="dataset", local_dir=directory)
    except (hub.errors.HTTPError, hub.errors.LocalEntryNotFoundError,
            hub.errors.OfflineModeIsEnabled,
            OSError) as error:
        raise UserError(f"{name}: the download failed ({reason(error)}); {RESUME}") from None

    found = file_hash(path, "sha256")
    if file.lfs is None or found != file.lfs.sha256:
        os.unlink(path)
        expected = file.lfs.sha256 if file.lfs else "one that the hub has on record"
        raise UserError(f"{name}: SHA-256 {found}, expected {expected}: the download is corrupt;"
                        f" {RESUME}")
    return path


def fetch_shards(repository, output, name, most):
    """Download the validation shard and the first `most` training shards (None: all), except those
    that exist: to OUTPUT/NAME_val_000000.bin, OUTPUT/NAME_train_000001.bin and so on."""
    hub = import_package("huggingface_hub", "a download")
    import_package("huggingface_hub.errors", "a download")
    files = list_shards(hub, repository)
    numbers = sorted(files)[: None if most is None else most + 1]
    paths = {number: os.path.join(output, f"{name}_{'train' if number else 'val'}_{number:06d}.bin")
             for number in numbers}
    missing = [number for number in numbers
               if not os.path.isfile(paths[number])
               or os.path.getsize(paths[number]) != files[number].size]

    needed = sum(files[number].size for number in missing)
    free = shutil.disk_usage(output).free
    print(f"{repository}: {len(numbers)} shards, {len(missing)} to download, about"
          f" {needed / 1e9:.1f} GB to write; {output} has {free / 1e9:.1f} GB free")
    if needed > free:
        raise UserError(f"{output}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free: pass a"
                        " smaller --shards N, or another --output")

    downloads = os.path.join(output, ".download")
    for number in missing:
        fetched = fetch(hub, repository, files[number], downloads)
        count = len(open_tokens(fetched, 50257))
        with errors_of_writing(paths[number]):
            with open(fetched, "rb") as f:
                os.fsync(f.fileno())
            os.replace(fetched, paths[number])
        print(f"Saved {count} tokens to {paths[number]}")
    shutil.rmtree(downloads, ignore_errors=True)


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu")
    parser.add_argument("--size", choices=("10B", "100B"), default="10B",
                        help="number of tokens of the dataset")
    parser.add_argument("--shards", type=int, metavar="N", default=argparse.SUPPRESS,
                        help="the first N training shards, and the validation shard (default: all)")
    parser.add_argument("--output", metavar="DIR", default=argparse.SUPPRESS,
                        help="directory of the shards (default: data/fineweb10B,"
                        " data/edu_fineweb100B and so on)")
    args = parser.parse_args()
    args.shards = getattr(args, "shards", None)
    if args.shards is not None and args.shards < 1:
        raise UserError(f"--shards {args.shards}: expected at least 1")
    return args


def main():
    args = parse_arguments()
    name = "edu_fineweb" if args.edu else "fineweb"
    output = getattr(args, "output", os.path.join("data", f"{name}{args.size}"))
    vocabulary = open_vocabulary("gpt2")
    make_directory(output)
    with locked(output, "--output"):
        fetch_shards(REPOSITORIES[args.edu, args.size], output, name, args.shards)
        save_vocabulary(os.path.join(output, f"{name}_tokenizer.bin"), vocabulary)


if __name__ == "__main__":
    run_main(main)
