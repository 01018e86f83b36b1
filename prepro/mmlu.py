"""
MMLU -> tokens: 14,042 questions of exams with four answers each, for evaluate.py --mmlu.

    python prepro/mmlu.py                     # downloads 166 MB, prints:
        Saved 14042 examples to data/mmlu_test.bin

The test set of https://github.com/hendrycks/test (Hendrycks et al. 2021,
https://arxiv.org/abs/2009.03300) as llm.c's
script asks it: "Question: ...", an empty line, "Answer:", and each answer with a leading space.
--input FILE reads a data.tar that you already have. --vocabulary takes a Hugging Face folder's
tokens for GPT-2's.
"""

import root  # noqa: F401  (first: it finds the project)

import csv
import io
import os
import re
import tarfile

from llmc.errors import Parser, UserError, run_main
from llmc.files import make_directory
from llmc.vocabulary import open_vocabulary
from prepro.common import check_not_written_over, download, read_input
from prepro.hellaswag import make_example, write_examples

URL = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"
SHA256 = "bec563ba4bac1d6aaf04141cd7d1605d7a5ca833e38f994051e818489592989b"


def questions(path):
    """Yield (question, answers, the right one's letter) of the test files in a tar archive, in
    sorted order."""
    try:
        with tarfile.open(fileobj=io.BytesIO(read_input(path))) as archive:
            names = sorted(name for name in archive.getnames()
                           if re.fullmatch(r"(\./)?data/test/[^/.]+\.csv", name))
            for name in names:
                text = archive.extractfile(name).read().decode("utf-8")
                for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
                    if len(row) != 6 or row[5] not in set("ABCD"):
                        raise UserError(f"{path}: {name}:{number}: {row!r:.80}, expected a"
                                        " question, four answers and the letter of the right one")
                    yield row[0], row[1:5], row[5]
    except (tarfile.TarError, UnicodeDecodeError, csv.Error, EOFError) as error:
        raise UserError(f"{path}: not MMLU's data.tar ({error})") from None


def main():
    parser = Parser(__doc__)
    parser.add_argument("--input", metavar="FILE", help="data.tar, instead of the download")
    parser.add_argument("--url", default=URL,
                        help="where the download comes from (the SHA-256 is checked)")
    parser.add_argument("--output", metavar="FILE", default=os.path.join("data", "mmlu_test.bin"),
                        help="the file to write")
    parser.add_argument("--vocabulary", metavar="NAME", default="gpt2",
                        help="gpt2, or a Hugging Face folder")
    args = parser.parse_args()

    path = args.input
    if path is None:
        path = os.path.join(os.path.dirname(args.output), "mmlu_data.tar")
        download(args.url, path, SHA256, "sha256")
    check_not_written_over([path], [args.output])
    vocabulary = open_vocabulary(args.vocabulary)
    examples = [make_example(f"Question: {question}\n\nAnswer:", answers, "ABCD".index(letter),
                             vocabulary)
                for question, answers, letter in questions(path)]
    make_directory(os.path.dirname(args.output))
    write_examples(args.output, examples, len(vocabulary.tokens))
    print(f"Saved {len(examples)} examples to {args.output}")


if __name__ == "__main__":
    run_main(main)
