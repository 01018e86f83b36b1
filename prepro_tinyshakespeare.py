"""
tiny_shakespeare -> GPT-2 tokens, for a first run that overfits in minutes.

    python prepro_tinyshakespeare.py          # downloads 1.1 MB, prints:
        Saved 32768 tokens to data/tiny_shakespeare_val.bin
        Saved 305260 tokens to data/tiny_shakespeare_train.bin
        Saved the vocabulary of 50257 tokens to data/tiny_shakespeare_tokenizer.bin

Each speech starts with an end-of-text token. The first 32768 tokens are for validation (a tenth, if
that is less; or
--val_fraction), the rest for training.
--input FILE reads any UTF-8 text with blank lines between its parts; for other texts, use
prepro_text.py.
"""

import os

from llmc.errors import run_main
from llmc.vocabulary import open_vocabulary
from prepro.common import (add_val_fraction, check_not_written_over, download, make_parser,
                           output_paths, read_input, save_split)
from prepro.encodings import NotText

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
VAL_TOKENS = 32768


def main():
    parser = make_parser(__doc__, os.path.join("data", "tiny_shakespeare"))
    parser.add_argument("--input", metavar="FILE", help="a local text, instead of the download")
    parser.add_argument("--url", default=URL, help="address of the download (its MD5 is checked)")
    add_val_fraction(parser, VAL_TOKENS)
    args = parser.parse_args()

    path = args.input
    if path is None:
        path = os.path.join(os.path.dirname(args.output), "tiny_shakespeare.txt")
        download(args.url, path, MD5)
    check_not_written_over([path], output_paths(args.output))
    try:
        text = read_input(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotText(path, f"byte {error.start}", error.object) from None
    vocabulary = open_vocabulary("gpt2")
    tokens = []
    *speeches, last = text.replace("\r\n", "\n").split("\n\n")
    for speech in [*(f"{speech}\n\n" for speech in speeches), last]:
        tokens += [vocabulary.eot, *vocabulary.encode(speech)]
    save_split(tokens, VAL_TOKENS, vocabulary, args)


if __name__ == "__main__":
    run_main(main)
