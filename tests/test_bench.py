"""What the GPU benchmark makes of its workers' results, and its picture; no GPU needed."""

import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import train_gpt2  # noqa: F401  (first: it tells OpenBLAS how to run, before NumPy is imported)

import numpy as np
import pytest

from conftest import ROOT, assert_one_line_error, run_program

sys.path.insert(0, str(ROOT / "dev"))
import bench_gpu
import bench_products
import compare_losses

RESULT = {"B": 64, "ms": 100.0, "first": 1.0, "memory": 2**30, "used": 3 * 2**29, "gpu": "NVIDIA H200"}
OURS = {**RESULT, "cold": 4.0, "flops": 35e12, "moved": 0.0, "product": 700e12, "bandwidth": 4e12,
        "profile": {"matmul fc": 60.0, "attention_forward": 30.0, "begin_step": 10.0}}


def test_table():
    jobs = [bench_gpu.Job("ours", "bfloat16", 64), bench_gpu.Job("compile", "bfloat16", 64), bench_gpu.Job("eager", "bfloat16", 64)]
    lines = bench_gpu.make_table("bfloat16", list(zip(jobs, (OURS, {**RESULT, "gpu": "an unknown one"}, {"failed": "no memory"}))))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    rate = 64 * 1024 / 0.1
    mfu = rate * (6 * 124439808 + 6 * 12 * 768 * 1024) / 989.4e12
    assert cells[0][1:] == ["64", "bfloat16", "100.00", f"{rate:.0f}", f"{mfu:.1%}", "4.0 s, warm 1.0 s", "1.00 GiB", "1.50 GiB", "50%"]
    faster = (jobs[0], {**OURS, "ms": 50.0, "product": 1400e12})
    lines = bench_gpu.make_table("bfloat16", [(jobs[0], OURS), faster, (jobs[0]._replace(precision="tf32"), OURS)])
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["25%", "50%", "50%"], "by the best rate in a row's own precision"
    assert cells[1][5] == f"{mfu * 989.4 / 700:.1%}", "the peak of an unknown GPU is that of one large product"
    alone = bench_gpu.make_table("bfloat16", [(jobs[1], {**RESULT, "gpu": "an unknown one"})])
    assert alone[2].split("|")[6].strip() == ""
    assert cells[2][3] == "failed: no memory" and len({len(row) for row in cells}) == 1


@pytest.mark.parametrize("gpu, teraflops", (
    ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA L40S", 362.1), ("NVIDIA L40", 181.0), ("NVIDIA L4", 121.0),
    ("Tesla T4", None)))
def test_peaks(gpu, teraflops):
    assert bench_gpu.peak(gpu) == (teraflops and teraflops * 1e12)


def test_picture(tmp_path):
    rows = [{"name": "ours", "precision": "bfloat16", **OURS, "B": B} for B in (4, 64)]
    rows.append({"name": "compile", "precision": "bfloat16", **RESULT})
    (tmp_path / "results.json").write_text(json.dumps({"machine": "a machine", "results": rows}))
    run_program("dev/plot_bench.py", "results.json", "-o", "picture.png", cwd=tmp_path)
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "results.json").write_text("[]")
    damaged = run_program("dev/plot_bench.py", "results.json", cwd=tmp_path, check=False)
    assert_one_line_error(damaged, "results.json", "bench_gpu.py --readme")
    assert_one_line_error(run_program("dev/plot_bench.py", "none.json", cwd=tmp_path, check=False), "none.json", "no such file")


def test_products():
    config, B = bench_gpu.MODELS["124M"], 4
    products, N = bench_products.products_of(config), B * bench_products.T
    assert len({product.name for product in products}) == len(products) == 17
    work = sum(2 * rows * columns * inner * product.calls for product in products if not product.alone
               for rows, columns, inner in [product.sizes(N)])
    assert work == 6 * N * (12 * 12 * 768 * 768 + 50304 * 768), "three products for each weight of a layer, and for the logits'"
    times = [(product, 2e-5 * (1 + i), 1e-5 * (1 + i)) for i, product in enumerate(products)]
    lines = bench_products.table(B, "bfloat16", times)
    assert lines[0] == "B=4, T=1024, bfloat16:" and len({line.count("|") for line in lines[2:]}) == 1
    assert lines[4] == "| qkv | 4096 x 2304 x 768 | 12 | 20.0 | 10.0 | 0.500 |"
    assert any(line.startswith("| logits dweight | 50304 x 768 x 4096 | 1 | 340.0 | 170.0 |") for line in lines)
    for line, name, others in ((lines[-2], "all of a step", ("fc", "fcproj dinp")),
                               (lines[-1], "the products alone", ("fc and GELU", "fcproj dinp, GELU', column sums"))):
        ms = sum(product.calls * 0.02 * (1 + i) for i, product in enumerate(products) if product.name not in others)
        assert line == f"| {name} | | 147 | {ms:.2f} ms | {ms / 2:.2f} ms | 0.500 |"


def test_the_summary_has_ours_beside_the_others():
    jobs = [bench_gpu.Job(name, "bfloat16", B) for B in (4, 32) for name in ("ours", "compile", "reduce-overhead")]
    results = [(job, {"ms": 10.0 * job.B + i}) for i, job in enumerate(jobs)]
    results.append((bench_gpu.Job("compile", "bfloat16", 64), {"failed": "x"}))
    results.append((bench_gpu.Job("ours", "bfloat16", 4, recompute=1), {"ms": 1.0}))
    assert len(bench_gpu.make_summary(results)) == 4, "another GPU than an H200: what was measured, no more"
    results.append((bench_gpu.Job("ours", "bfloat16", 4), {"ms": 40.0, "gpu": "NVIDIA H200"}))
    lines = bench_gpu.make_summary(results)
    assert "| train_gpt2_cuda.py | 40.00 | 323.00 |  |" in lines and "| PyTorch at its best | 41.00 | 324.00 |  |" in lines
    assert lines[2].startswith("| llm.c") and lines[-1] == "| stretch goal | 8.0 | 48 | 96 |"
    assert len({line.count("|") for line in lines}) == 1


def test_pytorch_by_other_kernels_computes_the_same(workplace):
    """Its losses, on the CPU, over four steps: those of train_gpt2.py, whether the batch comes at once or a sequence at a time."""
    args = argparse.Namespace(e="gpt2_124M.bin", i="data/tiny_shakespeare", b=3, t=16)
    trained = run_program("train_gpt2.py", "-b", 3, "-t", 16, "-x", 4, "-v", 0, "-s", 0, "-l", compare_losses.ADAMW["learning_rate"]).stdout
    expected = [float(loss) for loss in re.findall(r"train loss (\S+)", trained)]
    for others in (False, True):
        losses = compare_losses.run_pytorch(args, 4, "test", others=others, device="cpu")
        assert len(losses) == 4 and np.allclose(losses, expected, rtol=0, atol=1e-5)


def test_losses_within_the_band():
    """No farther off, at most and on average, than two curves of PyTorch's are apart; a constant offset that only the largest gap
    would cover is too far."""
    one = np.linspace(10.0, 4.0, 50)
    two = one + 0.01 * np.sin(np.arange(50))
    two[20] += 0.1
    for shift, okay in ((0.0, True), (0.004, True), (0.05, False), (-0.2, False)):
        ours = (one + two) / 2 + shift
        apart, off, found = compare_losses.within_band(ours, one, two)
        assert found == okay and np.allclose(apart, np.abs(one - two)) and (off <= np.abs(ours - one) + 1e-12).all()


def test_the_place_of_the_products_table(tmp_path):
    path = tmp_path / "products.md"
    path.write_text((ROOT / "dev" / "products.md").read_text())
    bench_products.put_between_markers("products", "a table", path)
    text = path.read_text()
    assert "<!-- products begin -->\na table\n<!-- products end -->" in text and "By our own kernels" in text.split("a table")[0]


def test_the_walkthrough_names_every_kernel_of_a_step():
    import train_gpt2_cuda as cuda

    text = (ROOT / "doc" / "walkthrough.md").read_text()
    named = set(re.findall(r"`(\w+)`", text))
    elsewhere = {"transpose", "round_weights", "hold", "fill_random"}  # float32's weight gradients, the start, timing, --profile
    assert {kernel for kernels in cuda.KERNELS.values() for kernel in kernels} - elsewhere <= named
    profiled = set(re.findall(r"^(matmul [a-z ]+?|batch \w+) {2,}", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert len(profiled) == 17 and all(f"| {name} |" in text for name in profiled)


def test_what_needs_a_gpu_says_so():
    programs = (["dev/bench_attention.py"], ["dev/bench_products.py"], ["dev/compare_losses.py"], ["dev/kernels/overlap.py"],
                ["dev/kernels/bench.py", "layernorm_forward"], ["test_gpt2.py", "--backend", "cuda"])
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda program: run_program(*program, check=False, CUDA_VISIBLE_DEVICES=""), programs):
            assert_one_line_error(done, "GPU")
