"""
Python's own standard library -> bytes as tokens: text to train on that is on every machine, with no download.

    python prepro_pystdlib.py                 # prints:
        Saved 65536 tokens to data/pystdlib_val.bin
        Saved 4128768 tokens to data/pystdlib_train.bin
        Saved the vocabulary of 257 tokens to data/pystdlib_tokenizer.bin

Files are read in sorted order up to a fixed total size, and each starts with an end-of-text token. The first 65536
tokens are for validation, the rest for training. The vocabulary is the 256 byte values and end of text (id 256).
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import os
import sysconfig

from llmc.errors import run_main
from prepro import add_val_fraction, load_encoding, make_parser, read_input, save_split

LIMIT = 4 * 1024 * 1024  # tokens in all
VAL_TOKENS = 65536
SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}


def source_files(root):
    """Return the sorted paths of the .py files below root, without tests, data tables and private modules (_*.py)."""
    paths = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED]
        public = (file for file in files if file[0] != "_" or file == "__init__.py")
        paths += [os.path.join(directory, file) for file in public if file.endswith(".py")]
    return sorted(paths, key=lambda path: os.path.relpath(path, root).replace(os.sep, "/"))


def main():
    parser = make_parser(__doc__.strip().split("\n")[0], os.path.join("data", "pystdlib"))
    add_val_fraction(parser, VAL_TOKENS)
    args = parser.parse_args()
    encoding, tokens = load_encoding("bytes"), []
    for path in source_files(sysconfig.get_path("stdlib")):
        text = read_input(path).decode("utf-8", errors="replace")
        tokens += [encoding.eot_token, *encoding.encode(text)]
        if len(tokens) >= LIMIT:
            break
    save_split(tokens[:LIMIT], VAL_TOKENS, encoding, args)


if __name__ == "__main__":
    run_main(main)
