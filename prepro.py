"""
What the prepro_*.py scripts share: the two vocabularies, a checked download, and the train / validation pair of files.

Not a program: run prepro_tinyshakespeare.py, prepro_tinystories.py or prepro_pystdlib.py.
"""

import argparse
import hashlib
import os
import re
import shlex

import numpy as np
import requests
import tiktoken
from tqdm import tqdm

from llmc.dataloader import write_tokens
from llmc.errors import UserError
from llmc.files import check_is_file, make_directory, replacing, together

TIMEOUT_SECONDS = 30  # without a byte from the server
EOT = "<|endoftext|>"


def load_encoding(vocabulary):
    """The tiktoken.Encoding of 'gpt2' (50257 tokens, downloaded by tiktoken, once) or 'bytes' (256 and end of text)."""
    if vocabulary == "bytes":
        return tiktoken.Encoding(
            name="bytes",
            pat_str=r"(?s).",  # one character at a time, which its UTF-8 bytes then stand for
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={EOT: 256},
        )
    try:
        return tiktoken.get_encoding("gpt2")
    except (requests.RequestException, OSError, ValueError) as error:
        raise UserError(f"GPT-2's vocabulary could not be downloaded ({reason(error)}): set TIKTOKEN_CACHE_DIR to a"
                        " directory that holds it, or use the byte vocabulary (prepro_pystdlib.py)") from None


LONG_SPACE = re.compile(r"\s{262144}(?=\s)")  # of a million, tiktoken's regular expression runs out of stack


def encode(encoding, text, **options):
    """The token ids of a text, with tiktoken's options; a very long white space is encoded piece by piece."""
    ends = [match.end() for match in LONG_SPACE.finditer(text)]
    pieces = (text[start:end] for start, end in zip([0, *ends], [*ends, len(text)]))
    return [id for piece in pieces for id in encoding.encode(piece, **options)]


def reason(error):
    """The innermost cause of a network error, on one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return " ".join(str(error).split()) or type(error).__name__


def download(url, path, md5):
    """Fetch a URL into a file with a progress bar, unless the file is there with that MD5 already.

    Raises UserError that names the URL, the reason and --input; nothing is left half-written, or written over.
    """
    if os.path.lexists(path):
        read_input(path)  # raises what is wrong with it
        found = file_hash(path, "md5")
        if found != md5:
            raise UserError(f"{path}: MD5 {found}, expected {md5}: it is not the text that is downloaded to there; move"
                            f" it away, or tokenize it with --input {shlex.quote(path)}")
        return
    make_directory(os.path.dirname(path))
    found = hashlib.md5()
    try:
        with requests.get(url, stream=True, timeout=TIMEOUT_SECONDS) as response:
            response.raise_for_status()
            size = int(response.headers.get("Content-Length", 0)) or None
            with replacing(path) as f, tqdm(total=size, unit="B", unit_scale=True, desc=os.path.basename(path)) as bar:
                for piece in response.iter_content(1 << 16):
                    f.write(piece)
                    found.update(piece)
                    bar.update(len(piece))
                if found.hexdigest() != md5:
                    raise UserError(f"{url}: MD5 {found.hexdigest()}, expected {md5}: the download is damaged or"
                                    " the text has changed; try again, or pass a good copy with --input FILE")
    except requests.RequestException as error:
        raise UserError(f"{url}: the download failed ({reason(error)}); fetch it by other means and pass"
                        " --input FILE") from None


def file_hash(path, algorithm):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, algorithm).hexdigest()


def read_input(path):
    """The bytes of a text."""
    check_is_file(path, "pass --input FILE")
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def save_tokens(files, format):
    """Write token files, all of them or none, and say so. files: {path: list of integer arrays}."""
    counts = {path: sum(map(len, pieces)) for path, pieces in files.items()}
    with together():
        for path, pieces in files.items():
            make_directory(os.path.dirname(path))
            write_tokens(path, pieces, counts[path], format)
    for path, count in counts.items():
        print(f"Saved {count} tokens to {path}")


def add_val_fraction(parser, most):
    parser.add_argument("--val_fraction", type=float, metavar="X", default=argparse.SUPPRESS,
                        help=f"how much of the tokens validates (default: 0.1, at most {most} tokens)")


def save_split(tokens, most, args):
    """The first tokens to PREFIX_val.bin, the others to PREFIX_train.bin: args.val_fraction validates, or where it is
    not given a tenth, at most `most` tokens."""
    tokens, fraction = np.asarray(tokens), getattr(args, "val_fraction", None)
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise UserError(f"--val_fraction {fraction}: expected more than 0 and less than 1")
    val_tokens = min(len(tokens) // 10, most) if fraction is None else int(len(tokens) * fraction)
    if not 0 < val_tokens < len(tokens):
        raise UserError(f"{len(tokens)} tokens of text, of which {val_tokens} would validate, expected at least one to"
                        " validate and one to train: give more text, or another --val_fraction")
    save_tokens({f"{args.output}_val.bin": [tokens[:val_tokens]], f"{args.output}_train.bin": [tokens[val_tokens:]]},
                args.format)


def make_parser(description, output, output_help="token files are named PREFIX_train.bin and PREFIX_val.bin"):
    """The flags that every prepro script has: --format and --output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--format", choices=("int32", "uint16"), default="int32",
                        help="int32: llm.c of April 2024; uint16: with a header, llm.c of today")
    parser.add_argument("--output", metavar="PREFIX", default=output, help=output_help)
    return parser
