"""
Run the code of layernorm.md, and compare what it prints with what stands there.

    python doc/layernorm/run_page.py             # all Python blocks; those for a GPU where there is one
    python doc/layernorm/run_page.py --figures   # on a GPU: and put the measurement into the page

The blocks of the page, by what stands behind the three backquotes: `python` runs everywhere,
`python gpu` needs a GPU, and all run in order in one namespace. `cuda` is a file, named in its
first line. `text` right after a Python block is what that block prints.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
from typing import NamedTuple

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path[:0] = [ROOT, os.path.join(ROOT, "dev")]

from llmc.gpu.device import open_gpu
from llmc.errors import UserError, run_main
from llmc.files import replacing

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "layernorm.md")


class Block(NamedTuple):
    kind: str
    line: int  # of its first line, from 1
    content: str
    output: str | None  # what a Python block prints, if the page says so


def put_between_markers(name, text, path):
    """Replace the text between `<!-- NAME begin -->` and `<!-- NAME end -->`."""
    begin = f"<!-- {name} begin -->"
    end = f"<!-- {name} end -->"
    with open(path, encoding="utf-8") as f:
        before, _, rest = f.read().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError(f"{path}: the markers {begin} and {end} are not in it")
    with replacing(path) as f:
        f.write(f"{before}{begin}\n{text}\n{end}{after}".encode())


def read_blocks(page, path=PAGE):
    """The fenced blocks of a page's text, in order."""
    blocks = []
    start = None
    after = 0
    lines = page.split("\n")
    for i, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if start is None:
            start = i
            kind = line[3:]
            continue
        content = "\n".join(lines[start : i - 1]) + "\n"
        if kind != "text":
            blocks.append(Block(kind, start + 1, content, None))
        elif not blocks or not blocks[-1].kind.startswith("python") or after != start - 1:
            raise UserError(f"{path}: line {start}: a text block, expected right after the Python"
                            " block that prints it")
        else:
            blocks[-1] = blocks[-1]._replace(output=content)
        start = None
        after = i
    if start is not None:
        raise UserError(f"{path}: line {start}: the block has no end")
    return blocks


def cuda_name(block):
    """The name of the file that a CUDA block says it is."""
    return block.content.split(":")[0].removeprefix("// ")


def run_blocks(blocks, kinds, path=PAGE):
    """Run the Python blocks of these kinds in one namespace, in an empty directory that has the
    CUDA blocks as files; returns what the last one printed. Raises UserError for a block that
    prints something else than the page says."""
    namespace = {}
    printed = ""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        for block in blocks:
            if block.kind == "cuda":
                with open(os.path.join(directory, cuda_name(block)), "w") as f:
                    f.write(block.content)
        os.chdir(directory)
        try:
            for block in blocks:
                if block.kind not in kinds:
                    continue
                output = io.StringIO()
                # So that a traceback has the page's lines
                code = compile("\n" * (block.line - 1) + block.content, path, "exec")
                with contextlib.redirect_stdout(output):
                    exec(code, namespace)
                printed = output.getvalue()
                if block.output is not None and printed != block.output:
                    raise UserError(f"{path}: the block at line {block.line} prints {printed!r},"
                                    f" expected {block.output!r}")
        finally:
            os.chdir(here)
    return printed


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--figures", action="store_true",
                        help="put what the last block prints into the page; needs a GPU")
    args = parser.parse_args()
    with open(PAGE, encoding="utf-8") as f:
        blocks = read_blocks(f.read())
    kinds = ["python", "python gpu"]
    try:
        open_gpu()
    except UserError as error:
        if args.figures:
            raise
        kinds.remove("python gpu")
        print(f"The blocks for a GPU are left out: {error}", file=sys.stderr)
    printed = run_blocks(blocks, kinds)
    count = sum(block.kind in kinds for block in blocks)
    print(f"{count} blocks ran and printed what the page says.")
    if "python gpu" in kinds:
        print(printed, end="")
    if args.figures:
        put_between_markers("figures", f"```\n{printed.rstrip()}\n```", PAGE)


if __name__ == "__main__":
    run_main(main)
