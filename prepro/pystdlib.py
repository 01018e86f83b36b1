"""
Python's own standard library -> tokens: text to train on that is on every machine, with no
download.

    python prepro/pystdlib.py --prose         # its English, character by character; prints:
        Saved 65536 tokens to data/pyprose_val.bin
        Saved 1241020 tokens to data/pyprose_train.bin
        Saved the vocabulary of 97 tokens to data/pyprose_tokenizer.bin
    python prepro/pystdlib.py                 # its source code, byte by byte: data/pystdlib_{val,train,tokenizer}.bin

Files are read in sorted order, up to a fixed total size, and each starts with an end-of-text token.
The first 65536 tokens are for validation, the rest for training. The vocabulary of source code is
the 256 byte values and end of text (id 256).
"""

import root  # noqa: F401  (first: it finds the project)

import argparse
import ast
import os
import re
import sysconfig

from llmc.errors import run_main
from llmc.vocabulary import open_vocabulary
from prepro.common import add_val_fraction, make_parser, read_input, save_split

LIMIT = 4 * 1024 * 1024  # tokens in all
VAL_TOKENS = 65536
SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}


def source_files(folder, prose):
    """Return the sorted paths of the .py files below a folder, without tests and data tables; of
    source code, also without private modules (_*.py) and pydoc_data, Python's reference manual as
    strings."""
    paths = []
    for directory, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in SKIPPED
                    and (prose or name != "pydoc_data")]
        chosen = (file for file in files if prose or file[0] != "_" or file == "__init__.py")
        paths += [os.path.join(directory, file) for file in chosen if file.endswith(".py")]
    return sorted(paths, key=lambda path: os.path.relpath(path, folder).replace(os.sep, "/"))


def prose_of(source):
    """Return the English in a module's strings and comments: paragraphs of 60 characters or more,
    nearly all of them letters, from a capital to a full stop or colon, each on one line, with an
    empty line between them."""
    texts = [node.value for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts += [re.sub(r"^[ \t]*#+", "", block, flags=re.M)
              for block in re.findall(r"(?:^[ \t]*#.*\n)+", source, re.M)]
    paragraphs = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in dict.fromkeys(paragraphs)
                       if re.fullmatch(r"[A-Z][ -~]{58,}[.:]", part)
                       and len(re.findall(r"[A-Za-z ,.;']", part)) >= 0.95 * len(part))


def main():
    parser = make_parser(__doc__, argparse.SUPPRESS)
    parser.add_argument("--prose", action="store_true",
                        help="its English, instead of its source code: data/pyprose")
    add_val_fraction(parser, VAL_TOKENS)
    args = parser.parse_args()
    args.output = getattr(args, "output",
                          os.path.join("data", "pyprose" if args.prose else "pystdlib"))
    texts = (read_input(path).decode("utf-8", errors="replace")
             for path in source_files(sysconfig.get_path("stdlib"), args.prose))
    if args.prose:
        texts = [f"{prose}\n" for prose in map(prose_of, texts) if prose]
    vocabulary = open_vocabulary(*("chars", "".join(texts)) if args.prose else ("bytes",))
    tokens = []
    for text in texts:
        tokens += [vocabulary.eot, *vocabulary.encode(text)]
        if len(tokens) >= LIMIT:
            break
    save_split(tokens[:LIMIT], VAL_TOKENS, vocabulary, args)


if __name__ == "__main__":
    run_main(main)
