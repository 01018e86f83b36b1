"""
HellaSwag -> tokens: 10,042 contexts with four endings each, for --hellaswag of the trainers and
evaluate.py.

    python prepro/hellaswag.py                # downloads 12 MB, prints:
        Saved 10042 examples to data/hellaswag_val.bin

The validation set of https://github.com/rowanz/hellaswag in llm.c's layout: each ending after a
space. --input FILE reads a hellaswag_val.jsonl that you already have, or any file in its format.
--vocabulary takes a Hugging Face folder's tokens for GPT-2's.
"""

import root  # noqa: F401  (first: it finds the project)

import json
import os

import numpy as np

from llmc.errors import Parser, UserError, run_main
from llmc.hellaswag import BEGIN, ENDINGS, NUMBERS, Example
from llmc.files import EXAMPLES_MAGIC, HELLASWAG, make_directory, make_header, replacing
from llmc.vocabulary import Folder, open_vocabulary
from prepro.common import check_not_written_over, download, read_input

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
MOST = (1 << 16) - 1  # the largest uint16


def parse_line(where, line, vocabulary):
    """Parse a line of JSON into an Example; raises UserError that begins with `where` if it is not
    one."""
    try:
        record = json.loads(line)
        context = record["ctx"]
        endings = record["endings"]
        label = record["label"]
        if type(endings) is not list or not all(type(text) is str for text in (context, *endings)):
            raise TypeError("'ctx' or 'endings' that are not text")
        if len(endings) != ENDINGS or str(label) not in map(str, range(ENDINGS)):
            raise ValueError(f"{len(endings)} endings and label {label}")
        return make_example(context, endings, int(label), vocabulary)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise UserError(f"{where}: expected a JSON object with a text 'ctx', {ENDINGS} 'endings'"
                        f" and a 'label' of 0 to {ENDINGS - 1}, found: {error!r}") from None


def make_example(context, endings, label, vocabulary):
    """The Example of texts: the context after the token that begins a text, if there is one,
    endings after a space. GPT-2's tokens are llm.c's, of each text alone. Another vocabulary may
    cut an ending otherwise within a text, so both are encoded together, as EleutherAI's harness
    does: an ending's ids are those after the context's."""
    if isinstance(vocabulary, Folder):
        text = context.rstrip()
        ids = vocabulary.encode(text)
        spaces = context[len(text) :] + " "
        ids_of_endings = [vocabulary.encode(text + spaces + ending)[len(ids) :]
                          for ending in endings]
    else:
        ids = vocabulary.encode(context)
        ids_of_endings = [vocabulary.encode(f" {ending}", begin=False) for ending in endings]
    return Example(np.array(ids, np.int32),
                   [np.array(ending, np.int32) for ending in ids_of_endings], label)


def write_examples(path, examples, V):
    """Write a list of Examples in the format of llmc/hellaswag.py, version 2 if V ids do not fit
    into uint16; raises UserError for what it cannot hold."""
    if not 0 < len(examples) <= MOST:
        raise UserError(f"{path}: {len(examples)} examples, expected 1 to {MOST}")
    records = []
    dtype = NUMBERS[version := 1 if V <= MOST else 2]
    for index, (context, endings, label) in enumerate(examples):
        parts = [part for ids in (context, *endings) for part in ([len(ids)], ids)]
        size = dtype.itemsize * (5 + sum(map(len, parts)))
        if size > MOST or any(len(ids) == 0 for ids in (context, *endings)):
            raise UserError(f"{path}: example {index} has {size} bytes, expected at most {MOST},"
                            " and at least one token in its context and in each ending")
        records.append(np.concatenate([[BEGIN, size, index, label, len(endings)],
                                       *parts]).astype(dtype))
    with replacing(path) as f:
        f.write(make_header(EXAMPLES_MAGIC, version, len(records),
                            max(record.nbytes for record in records)))
        for record in records:
            f.write(record)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--input", metavar="FILE",
                        help="hellaswag_val.jsonl, instead of the download")
    parser.add_argument("--url", default=URL,
                        help="where the download comes from (the SHA-256 is checked)")
    parser.add_argument("--output", metavar="FILE", default=HELLASWAG, help="the file to write")
    parser.add_argument("--vocabulary", metavar="NAME", default="gpt2",
                        help="gpt2, or a Hugging Face folder")
    args = parser.parse_args()

    path = args.input
    if path is None:
        path = os.path.join(os.path.dirname(args.output), "hellaswag_val.jsonl")
        download(args.url, path, SHA256, "sha256")
    check_not_written_over([path], [args.output])
    vocabulary = open_vocabulary(args.vocabulary)
    examples = []
    for number, line in enumerate(read_input(path).splitlines(), 1):
        if line.strip():
            examples.append(parse_line(f"{path}:{number}", line, vocabulary))
    make_directory(os.path.dirname(args.output))
    write_examples(args.output, examples, len(vocabulary.tokens))
    print(f"Saved {len(examples)} examples to {args.output}")


if __name__ == "__main__":
    run_main(main)
