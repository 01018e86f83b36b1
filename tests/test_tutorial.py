"""doc/layernorm/layernorm.md: its Python blocks run and print what the page says, its CUDA blocks compile, its links
lead somewhere; the blocks of doc/attention/attention.md and doc/walkthrough.md likewise; what all pages link to or name
exists."""

import ast
import re
import sys

import numpy as np
import pytest

from conftest import ROOT
from llmc.gpu.compiler import compile_kernels

DIRECTORY = ROOT / "doc" / "layernorm"
sys.path.insert(0, str(DIRECTORY))
from run_page import cuda_name, read_blocks, run_blocks

PAGE = (DIRECTORY / "layernorm.md").read_text(encoding="utf-8")
BLOCKS = read_blocks(PAGE)


def test_python_blocks():
    assert sum(block.kind == "python" and block.output is not None for block in BLOCKS) >= 10
    run_blocks(BLOCKS, ["python"])


@pytest.mark.parametrize("name, count", (("attention/attention.md", 9), ("walkthrough.md", 10)))
def test_blocks_of(name, count):
    path = ROOT / "doc" / name
    blocks = read_blocks(path.read_text(encoding="utf-8"), path)
    assert len(blocks) == sum(block.kind == "python" and block.output is not None for block in blocks) == count
    with np.printoptions():  # which the page sets
        run_blocks(blocks, ["python"], path)


@pytest.mark.parametrize("name", ("layernorm/layernorm.md", "attention/attention.md", "walkthrough.md", "python.md"))
def test_blocks_can_be_pasted(name):
    """Python's prompt wants an empty line after the body of a loop or a function."""
    for block in read_blocks((ROOT / "doc" / name).read_text(encoding="utf-8")):
        lines = block.content.splitlines() if block.kind.startswith("python") else []
        ends = [node.end_lineno for node in ast.parse("\n".join(lines)).body if hasattr(node, "body")]
        assert [lines[end] for end in ends if lines[end:] and lines[end]] == []


@pytest.mark.gpu
def test_gpu_blocks():
    figures = run_blocks(BLOCKS, ["python", "python gpu"])
    assert re.search(r"^kernels/layernorm.cu +\d+\.\d +\d+ +\d+%$", figures, re.MULTILINE), figures


def test_cuda_blocks_compile(tmp_path, fake_gpu, monkeypatch):
    pytest.importorskip("cuda.core")
    cuda = [block for block in BLOCKS if block.kind == "cuda"]
    assert sorted(map(cuda_name, cuda)) == ["backward.cu", "thread_a_row.cu", "warp_a_row.cu"]
    for block in cuda:
        path = tmp_path / cuda_name(block)
        path.write_text(block.content)
        cubin = compile_kernels(str(path.with_suffix("")), "sm_80", {"MODEL_C": 768})
        kernels = re.findall(r'extern "C" __global__ void (\w+)', block.content)
        assert kernels and all(b".text." + kernel.encode() in cubin for kernel in kernels)
    monkeypatch.setitem(sys.modules, "cupy", fake_gpu.cp)
    first = next(block for block in BLOCKS if block.kind == "python gpu")
    run_blocks([*cuda, first], [first.kind])  # which loads a kernel of theirs


@pytest.mark.parametrize("name", ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(
    str(path.relative_to(ROOT)) for directory in ("doc", "dev") for path in sorted(ROOT.glob(f"{directory}/**/*.md")))))
def test_what_a_page_names_exists(name):
    """Targets of relative links, paths of this project, and programs in commands."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    paths = re.findall(r"(?<![\w/.~-])(?:llmc|kernels|dev|doc|tests|scripts)/[\w./-]*\w(?![\w/*{<])", text)
    programs = re.findall(r"\bpython ([\w/]+\.py)", text)
    missing = [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert missing + [path for path in (*paths, *programs) if not (ROOT / path).exists()] == []
