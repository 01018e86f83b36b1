"""What the GPU benchmark makes of its workers' results, and its picture; no GPU needed."""

import json
import sys

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import numpy as np
import pytest
import torch

from conftest import ROOT, assert_one_line_error, run_program

sys.path.insert(0, str(ROOT / "dev" / "kernels"))
import bench
import bench_attention
import bench_gpu
import bench_matmul
import check_gpu
import compare_losses
import llmc.gpu.device
import overlap
import profile_gpu
import train_gpt2
from llmc.settings import parse_settings

RESULT = {"B": 64, "ms": 100.0, "first": 1.0, "memory": 2**30, "used": 3 * 2**29, "gpu": "NVIDIA H200"}
OURS = {**RESULT, "cold": 4.0, "flops": 35e12, "moved": 0.0, "matmul": 700e12, "bandwidth": 4e12,
        "profile": {"matmul fc": 60.0, "attention_forward": 30.0, "copy_batch": 10.0}}


def test_table():
    jobs = [bench_gpu.Job("ours", "bfloat16", 64), bench_gpu.Job("compile", "bfloat16", 64),
            bench_gpu.Job("eager", "bfloat16", 64)]
    lines = bench_gpu.make_table("bfloat16", list(zip(jobs,
                                                      (OURS, {**RESULT, "gpu": "an unknown one"},
                                                       {"failed": "no memory"}))))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    rate = 64 * 1024 / 0.1
    mfu = rate * (6 * 124439808 + 6 * 12 * 768 * 1024) / 989.4e12
    assert cells[0][1:] == ["64", "bfloat16", "100.00", f"{rate:.0f}", f"{mfu:.1%}", "4.0 s, warm 1.0 s", "1.00 GiB",
                            "1.50 GiB", "50%"]
    faster = (jobs[0], {**OURS, "ms": 50.0, "matmul": 1400e12})
    lines = bench_gpu.make_table("bfloat16", [(jobs[0], OURS), faster, (jobs[0]._replace(precision="tf32"), OURS)])
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["25%", "50%",
                                                                   "50%"], "by the best rate in a row's own precision"
    assert cells[1][5] == f"{mfu * 989.4 / 700:.1%}", "the peak of an unknown GPU is that of one large matmul"
    alone = bench_gpu.make_table("bfloat16", [(jobs[1], {**RESULT, "gpu": "an unknown one"})])
    assert alone[2].split("|")[6].strip() == ""
    assert cells[2][3] == "failed: no memory" and len({len(row) for row in cells}) == 1


def test_picture(tmp_path):
    rows = [{"name": "ours", "precision": "bfloat16", **OURS, "B": B} for B in (4, 64)]
    rows.append({"name": "compile", "precision": "bfloat16", **RESULT})
    (tmp_path / "results.json").write_text(json.dumps({"machine": "a machine", "results": rows}))
    run_program("dev/plot_bench.py", "results.json", "-o", "picture.png", "--overview", "overview.png", cwd=tmp_path)
    assert (tmp_path / "overview.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "results.json").write_text("[]")
    damaged = run_program("dev/plot_bench.py", "results.json", cwd=tmp_path, check=False)
    assert_one_line_error(damaged, "results.json", "bench_gpu.py --readme")
    assert_one_line_error(run_program("dev/plot_bench.py", "none.json", cwd=tmp_path, check=False), "none.json",
                          "no such file")


def test_matmuls():
    config, B = bench_gpu.MODELS["124M"], 4
    shapes, N = bench_matmul.matmuls_of(config), B * bench_matmul.T
    assert len({shape.name for shape in shapes}) == len(shapes) == 17
    work = sum(2 * rows * columns * inner * shape.calls for shape in shapes if not shape.alone
               for rows, columns, inner in [shape.sizes(N)])
    assert work == 6 * N * (12 * 12 * 768 * 768 + 50304 * 768), "three for each weight of a layer, and for the logits'"
    times = [(shape, 2e-5 * (1 + i), 1e-5 * (1 + i)) for i, shape in enumerate(shapes)]
    lines = bench_matmul.table(B, "bfloat16", times)
    assert lines[0] == "B=4, T=1024, bfloat16:" and len({line.count("|") for line in lines[2:]}) == 1
    assert lines[4] == "| qkv | 4096 x 2304 x 768 | 12 | 20.0 | 10.0 | 0.500 |"
    assert any(line.startswith("| logits dweight | 50304 x 768 x 4096 | 1 | 340.0 | 170.0 |") for line in lines)
    for line, name, others in ((lines[-2], "all of a step", ("fc", "fcproj dinp")),
                               (lines[-1], "the matmuls alone", ("fc and GELU", "fcproj dinp, GELU', column sums"))):
        ms = sum(shape.calls * 0.02 * (1 + i) for i, shape in enumerate(shapes) if shape.name not in others)
        assert line == f"| {name} | | 147 | {ms:.2f} ms | {ms / 2:.2f} ms | 0.500 |"


def test_the_summary_has_ours_beside_the_others():
    jobs = [bench_gpu.Job(name, "bfloat16", B) for B in (4, 32) for name in ("ours", "compile", "reduce-overhead")]
    results = [(job, {"ms": 10.0 * job.B + i}) for i, job in enumerate(jobs)]
    results.append((bench_gpu.Job("compile", "bfloat16", 64), {"failed": "x"}))
    results.append((bench_gpu.Job("ours", "bfloat16", 4, recompute=1), {"ms": 1.0}))
    assert len(bench_gpu.make_summary(results)) == 4, "another GPU than an H200: what was measured, no more"
    results.append((bench_gpu.Job("ours", "bfloat16", 4), {"ms": 40.0, "gpu": "NVIDIA H200"}))
    lines = bench_gpu.make_summary(results)
    assert {"| train_gpt2_cuda.py | 40.00 | 323.00 |  |", "| PyTorch at its best | 41.00 | 324.00 |  |"} <= set(lines)
    assert lines[2].startswith("| train_gpt2_cuda.py |") and "| llm.c" in lines[-2][:8] and "another H200" in lines[-2]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("model", ("gpt2_124M.bin", "d2"))
def test_pytorch_by_other_kernels_computes_the_same(workplace, run_here, model):
    """Its losses, on the CPU, over four updates: those of train_gpt2.py, whether the batch comes at once or a sequence
    at a time; with accumulation, clipping, decay and a schedule. It needs no validation data."""
    (workplace / "data" / "tiny_shakespeare_val.bin").unlink()
    flags = ("-e", model, "-b", 3, "-t", 16, "-d", 96, "-x", 4, "-s", 0, "-l", 1e-3, "-u", 2, "-k", "cosine", "-c", 0.1,
             "--grad_clip", 0.5, "-o", "run")
    run_here(train_gpt2, *flags, "-v", 0)
    settings = parse_settings(compare_losses.Comparison, "", [*map(str, flags), "--run", "run"])
    expected = compare_losses.run_ours(settings)
    for others in (False, True):
        losses = compare_losses.run_pytorch(settings, 4, "test", others=others, device="cpu")
        assert len(losses) == 4 and np.allclose(losses, expected, rtol=0, atol=1e-4)  # of which a log has four digits


def test_losses_within_the_band():
    """An error no larger, at most and on average, than the gap between two curves of PyTorch's; a constant offset that
    only the largest gap would cover is too large."""
    one = np.linspace(10.0, 4.0, 50)
    two = one + 0.01 * np.sin(np.arange(50))
    two[20] += 0.1
    for shift, okay in ((0.0, True), (0.004, True), (0.05, False), (-0.2, False)):
        ours = (one + two) / 2 + shift
        gap, error, found = compare_losses.within_band(ours, one, two)
        assert found == okay and np.allclose(gap, np.abs(one - two)) and (error <= np.abs(ours - one) + 1e-12).all()


def test_the_place_of_the_matmul_tables(tmp_path):
    path = tmp_path / "matmul.md"
    path.write_text((ROOT / "dev" / "matmul.md").read_text())
    bench_matmul.put_between_markers("matmul", "a table", path)
    text = path.read_text()
    assert "<!-- matmul begin -->\na table\n<!-- matmul end -->" in text
    assert "By our own kernels" in text.split("a table")[0]


@pytest.mark.parametrize("program", (bench, bench_attention, bench_matmul, check_gpu, compare_losses, overlap,
                                     profile_gpu),
                         ids=lambda program: program.__name__)
def test_what_needs_a_gpu_says_so(monkeypatch, run_here, program):
    monkeypatch.setattr(llmc.gpu.device.cp.cuda.runtime, "getDeviceCount", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = ["layernorm_forward"] if program is bench else []
    assert_one_line_error(run_here(program, *flags, check=False), "GPU")
