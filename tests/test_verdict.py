"""The verdict of test_gpt2.py: small faults, planted in layers and kernels, are red; the first red
row says where."""

import functools
import inspect
import re
import shutil
import textwrap

import numpy as np
import pytest

import llmc.gpu.compiler
import train_gpt2 as t
import train_llama3
from conftest import ROOT, page_of, random_params
from llmc.tensors import allocate
from test_gpt2 import ADAMW_CHECK, SMOOTH, Yardstick, judge_update
from backends import BACKENDS, NumpyRun, precision_of, replay, starting_weights
from test_parity import need

CONFIG = t.Config(maxT=24, V=61, L=3, NH=2, C=32, Vp=128)
B, T = 3, 17
QUERY = np.s_[..., : CONFIG.C]  # in the three of qkv


def random_case(config, B, T):
    """(params, x, y) of a model, of either kind, whose norms, biases and scores are far from those
    of a new one."""
    rng = np.random.default_rng(3)
    params = allocate(page_of(config).parameter_table(config))
    for name, row in params.table.items():
        tensor = getattr(params, name)
        tensor[...] = rng.normal(row.ones, 0.15, tensor.shape)
        if row.vocabulary:
            tensor[config.V :] = 0.0
    return params, *rng.integers(0, config.V, (2, B, T), dtype=np.int32)


@functools.cache
def case(config):
    """((config, params, x, y), Yardstick)."""
    drawn = config, *random_case(config, B, T)
    return drawn, Yardstick(*drawn, "numpy")


def is_right(config, update=ADAMW_CHECK):
    """The verdict on a page in NumPy: its losses and gradients, and two updates with these
    settings."""
    drawn, yardstick = case(config)
    return (yardstick.judge(replay(NumpyRun(*drawn, SMOOTH)))
            and judge_update(NumpyRun(*drawn, update)))


# --------------------------------------------------------------------------------------------------
# faults: each takes the right function and gives a wrong one


def instead(old, new):
    """The right function with other text in the place of this."""
    def plant(right):
        text = textwrap.dedent(inspect.getsource(right))
        scope = dict(vars(inspect.getmodule(right)))
        assert text.count(old) == 1, old
        exec(text.replace(old, new), scope)
        return scope[right.__name__]
    return plant


def before(change, then=lambda a: None):
    """The right function, with arguments that change(arguments by name) makes of them; and then(the
    same)."""
    def plant(right):
        names = right.__code__.co_varnames[: right.__code__.co_argcount]

        def wrong(*arguments):
            by_name = dict(zip(names, arguments))
            by_name.update(change(by_name))
            right(*by_name.values())
            then(by_name)
        return wrong
    return plant


def given(**changes):
    """The right function of other arguments: name=change."""
    return before(lambda a: {name: change(a[name]) for name, change in changes.items()})


def scaled(name, factor, at=...):
    """Part of a result is multiplied."""
    def change(a):
        if a[name] is not None:
            a[name][at] *= np.float32(factor)
    return before(lambda a: {}, change)


def rounded_to(bits):
    """The operands of a matmul with so many bits."""
    def cut(x):
        scale = np.float32(2.0 ** (24 - bits) + 1)  # Dekker's splitting
        big = x * scale
        return big - (big - x)

    return given(inp=cut, weight=cut)


FAULTS = {  # what is wrong: (function, the fault, the first red row)
    "gelu's scale in its fifth digit": ("GELU_SCALE",
                                        lambda right: right * np.float32(1.00002), "logits"),
    "gelu backward off by 1e-5": ("gelu_backward", scaled("dinp", 1.00001), "dfcb"),
    "layernorm's eps 1e-6": ("layernorm_forward", instead("float32(EPS)", "float32(1e-6)"), "logits"),
    "layernorm's bias forgotten in its last channel": (
        "layernorm_forward", instead("out += bias", "out[..., :-1] += bias[:-1]"), "logits"),
    "layernorm backward's rstd off by 1e-4": (
        "layernorm_backward", given(rstd=lambda rstd: rstd * np.float32(1.0001)), "dlnfw"),
    "layernorm's dbias misses its last row": (
        "layernorm_backward", instead("reduce(d, axis=0)", "reduce(d[: N - 1 - i], axis=0)"),
        "dlnfb"),
    "layernorm's dweight off by 1e-5": ("layernorm_backward", scaled("dweight", 1.00001), "dlnfw"),
    "attention's scale off by 1e-5": ("attention_forward",
                                      instead("p *= scale", "p *= 1.00001 * scale"), "logits"),
    "attention sees one key too many": ("attention_forward",
                                        instead("p += mask", "p += np.triu(mask, 2)"), "logits"),
    "dquery off by 5e-5": ("attention_backward", scaled("dinp", 1.00005, at=QUERY), "dqkvb"),
    "dvalue of the last position lost": (
        "attention_backward", scaled("dinp", 0.0, at=np.s_[:, -1, 2 * CONFIG.C :]), "dqkvb"),
    "D of attention's backward off by 1e-4": (
        "attention_backward", instead("np.vecdot(a, da)", "1.0001 * np.vecdot(a, da)"), "dqkvb"),
    "matmuls with 16 bits": ("matmul_forward", rounded_to(16), "logits"),  # TF32 has 11, bfloat16 8
    "a tile's last column lost": ("matmul_forward", scaled("out", 0.0, at=np.s_[..., -1]),
                                  "logits"),
    "dweight of the last row and column off": (
        "matmul_backward", instead("out=dweight)", "out=dweight)[-1, -1] += 1e-3"), "dfcprojw"),
    "dinp off by 1e-5": ("matmul_backward", scaled("dinp", 1.00001), "dlnfb"),
    "dbias misses its last row": (
        "matmul_backward", instead("B * T, dout.dtype), dout", "B * T - 1, dout.dtype), dout[:-1]"),
        "dfcprojb"),
    "dbias off by 1e-5": ("matmul_backward", scaled("dbias", 1.00001), "dfcprojb"),
    "residual off by 2e-6": ("residual_forward", scaled("out", 1.000002), "logits"),
    "wpe's last position lost": ("encoder_backward", scaled("dwpe", 0.0, at=T - 1), "dwpe"),
    "wpe beyond T written": ("encoder_backward", instead("dwpe[T:] = 0.0", "dwpe[T:] = 0.001"),
                             "dwpe"),
    "wte: one position of a token lost": (
        "encoder_backward", instead("C)[order]", "C)[order] * (order > 0)[:, None]"), "dwte"),
    "softmax of the logits without the last token": (
        "softmax_forward", instead("reduce(p, ", "reduce(p[:, :-1], "), "losses"),
    "dlogits not less the one-hot in the last row": (
        "crossentropy_softmax_backward",
        instead("stop, 0]", "stop, 0] * (np.arange(start, stop) < N - 1)"), "dlnfb"),
    "dlosses in bfloat16": ("crossentropy_softmax_backward", scaled("dlogits", 1.0 + 2.0**-9),
                            "dlnfb"),
}


def first_wrong(capsys, yardstick, run):
    """The tensor that the verdict on a run names first, or None if it is green."""
    capsys.readouterr()
    okay = yardstick.judge(replay(run))
    found = re.search(r"^first wrong: (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert okay == (found is None)
    return found and found[1]


def test_no_fault_is_no_fault():
    assert is_right(CONFIG) and judge_update(NumpyRun(*case(CONFIG)[0],
                                                      {**ADAMW_CHECK, "decay": "all"}))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_layer_is_red(fault, monkeypatch, capsys):
    name, plant, row = FAULTS[fault]
    drawn, yardstick = case(CONFIG)
    monkeypatch.setattr(t, name, plant(getattr(t, name)))
    assert first_wrong(capsys, yardstick, NumpyRun(*drawn, SMOOTH)) == row


@pytest.mark.large
def test_a_small_fault_at_export_s_own_shape(monkeypatch):
    """export_weights.py --model d2 --vocabulary bytes, B=4, T=64, where rounding hides more: many
    elements show it."""
    config, params = t.random_model("d2", 257)
    x, y = np.random.default_rng(0).integers(0, 257, (2, 4, 64), dtype=np.int32)
    yardstick = Yardstick(config, params, x, y, "numpy")
    run = functools.partial(NumpyRun, config, params, x, y, SMOOTH)
    assert yardstick.judge(replay(run()))
    monkeypatch.setattr(t, "GELU_CUBE", np.float32(0.0447))
    assert not yardstick.judge(replay(run()))


ADAMW_FAULTS = {  # what is wrong: changes of adamw_update's arguments
    "beta1 0.89": lambda a: {"beta1": 0.89},
    "beta2 0.951": lambda a: {"beta2": 0.951},
    "bias correction off by a step": lambda a: {"step": a["step"] + 1},
    "eps 1e-7": lambda a: {"eps": 1e-7},
    "decay on biases": lambda a: {"weight_decay": 0.1},
    "learning rate off by 1e-5": lambda a: {"learning_rate": a["learning_rate"] * 1.00001},
}


@pytest.mark.parametrize("fault", ADAMW_FAULTS)
def test_a_fault_in_adamw_is_red(fault, monkeypatch, capsys):
    monkeypatch.setattr(t, "adamw_update", before(ADAMW_FAULTS[fault])(t.adamw_update))
    okay = judge_update(NumpyRun(*case(CONFIG)[0], ADAMW_CHECK))
    printed = capsys.readouterr().out
    assert not okay and re.match("update [mvp] ", printed)


GPU_CONFIG = t.Config(maxT=96, V=391, L=2, NH=2, C=128, Vp=512)

# what is wrong: (file, its text, what stands there instead, the first red row, the backend)
KERNEL_FAULTS = {
    "gelu's cube 0.0447": ("gelu.cuh", "CUBE = 0.044715f", "CUBE = 0.0447f", "logits"),
    "layernorm's eps 1e-6": ("layernorm.cu", "1e-5f", "1e-6f", "logits"),
    "rstd in bfloat16": (
        "norm.cuh", "  rstd[row] = r;",
        "  rstd[row] = __uint_as_float(__float_as_uint(r) & 0xffff0000u);", "dlnfw"),
    "layernorm backward without the mean of dn * n": (
        "layernorm.cu", " - (x.x[k] - m) * r * mean_dn_n", "", "dfcprojb"),
    "dweight of layernorm without a block's last row": (
        "norm.cuh", "i < ROWS; i++) sum", "i < ROWS - 1; i++) sum", "dlnfb"),
    "attention's scale off by 1 percent": (
        "attention.cu", "rescale, LOG2E * scale()", "rescale, 1.01f * LOG2E * scale()", "logits"),
    "attention sees one key too many": (
        "softmax.cuh", "> row + j % 4 / 2 * 8) s[j]", "> row + 1 + j % 4 / 2 * 8) s[j]", "logits"),
    "dquery without the last key": (
        "attention.cu", "start >= first && column > row", "start >= first && column >= row",
        "dqkvb"),
    "dkey off by 1e-4": (  # which a key's bias does not see: its gradient is 0
        "attention.cu", "dk[0], scale(), warp_row", "dk[0], 1.0001f * scale(), warp_row", "dqkvw"),
    "dqkvb without a warp's rows": ("attention.cuh", " + sums[3][c];", ";", "dqkvb"),
    "bfloat16: no query sees its own key in the gradient": (
        "attention_backward.cu", "if (column < warp_row + g", "if (column <= warp_row + g", "dqkvb",
        "cuda-bf16-sm_80"),
    "bfloat16: dkey lost": (
        "attention_backward.cu", "    matmul(dk, s, queries);\n", "", "dqkvw", "cuda-bf16-sm_80"),
    "column sums without the last block's": ("column_sums.cu", "r < job.rows;", "r < job.rows - 1;",
                                             "dlnfb"),
    "position embedding one on": ("encoder.cu", "int64(row % T) * C", "int64((row + 1) % T) * C",
                                  "logits"),
    "wpe's last position lost": ("encoder.cu", "if (t < T) add_rows", "if (t < T - 1) add_rows",
                                 "dwpe"),
    "wte: one position of a token lost": (
        "encoder.cu", "piece_begins[min(i + 1, N)],", "piece_begins[min(i + 1, N)] - 1,",
        "dwte"),
    "softmax with a padded column": ("classifier.cu", "v + k >= V) from_float",
                                     "v + k > V) from_float", "losses"),
    "the one-hot off by 1e-4": ("classifier.cu", ") * of_row;", ") * 1.0001f * of_row;", "dlnfb"),
    "bfloat16: a matmul without the last 16 products of 64": (
        "hopper/matmul.cuh", "slice < BK / 16;", "slice < BK / 16 - 1;", "logits",
        "cuda-bf16-kernels"),
    "bfloat16: a tile's last columns lost": (
        "hopper/matmul.cuh", "s < BN / STRIP_COLUMNS;", "s < BN / STRIP_COLUMNS - 1;", "logits",
        "cuda-bf16-kernels"),
    "bfloat16: every second column of a weight gradient that of its neighbour": (
        "hopper/matmul.cu", "x[1] * scale);", "x[0] * scale);", "dfcprojw", "cuda-bf16-kernels"),
    "bfloat16: attention's scale off by 5 percent": (
        "hopper/attention.cu", "TO_LOG2 = LOG2E * SCALE", "TO_LOG2 = 1.05f * LOG2E * SCALE",
        "logits", "cuda-bf16"),
    "bfloat16: a matmul's bias lost in every second column": (
        "hopper/matmul.cuh", "x[0] * scale + b.x", "x[0] * scale", "logits", "cuda-bf16-kernels"),
    "eps inside the root": ("update.cu", "(sqrtf(square.x[k]) + eps)",
                            "sqrtf(square.x[k] + eps * eps)", "adamw"),
    "decay on all weights": ("update.cu", "chunk.decay", "chunks[0].decay", "adamw"),
    "bias correction off by a step": (
        "update.cu", "pow(beta1, double(control->step))", "pow(beta1, double(control->step + 1))",
        "adamw"),
    "beta1 0.89": ("update.cu", "+= one_minus_beta1", "+= 1.1f * one_minus_beta1", "adamw"),
    "FP8: rows 48 .. 63 of each 64 are not among the largest": (
        "fp8.cuh", "if (threadIdx.x % 32 > 0) return;",
        "if (threadIdx.x % 32 > 0 || threadIdx.x % 128 == 96) return;",
        "dlnfb", "cuda-fp8"),
}


@functools.cache
def gpu_case(precision, outlier=False):
    """outlier: rows 48 .. 63 of each 64 of fcprojw are thirty times as large as the others."""
    # 64: a fault loses 16 rows of each
    params, x, y = random_case(GPU_CONFIG, 3, 64 if precision == "fp8" else 70)
    if outlier:
        params.fcprojw[:, np.arange(GPU_CONFIG.C) % 64 >= 48] *= 30
    params = starting_weights(params, precision)
    return params, x, y, Yardstick(GPU_CONFIG, params, x, y, precision)


def plant_in_a_kernel(tmp_path, monkeypatch, file, right, wrong):
    """What is compiled from now on has this text in place of another."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    path = tmp_path / "kernels" / file
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    monkeypatch.setattr(llmc.gpu.compiler, "KERNEL_DIRECTORY", str(tmp_path / "kernels"))


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_a_fault_in_a_kernel_is_red(fault, gpu, tmp_path, monkeypatch, capsys):
    file, right, wrong, row, backend = (*KERNEL_FAULTS[fault], "cuda")[:5]
    need(backend)
    if "hopper" in file and gpu.arch != "sm_90a":
        pytest.skip(f"{file}: for Hopper, this GPU is {gpu.arch}")
    plant_in_a_kernel(tmp_path, monkeypatch, file, right, wrong)
    params, x, y, yardstick = gpu_case(precision_of(backend), outlier=backend == "cuda-fp8")
    if row == "adamw":
        assert not judge_update(BACKENDS[backend](GPU_CONFIG, params, x, y, ADAMW_CHECK))
    else:
        assert (first_wrong(capsys, yardstick, BACKENDS[backend](GPU_CONFIG, params, x, y, SMOOTH))
                == row)


# what is wrong: (file, its text, what stands there instead, the first red row, the backend)
LLAMA_KERNEL_FAULTS = {
    "RMSNorm's eps doubled": ("norm.cuh", "/ C + eps)", "/ C + 2.0f * eps)", "logits"),
    "RMSNorm's gradient without the mean": ("rmsnorm.cu", "- x.x[k] * scaled_mean", "", "dfcprojw"),
    "RoPE's angles not negated": ("rope.cuh", "{angle.x, -angle.y}", "{angle.x, angle.y}", "dqkvw"),
    "RoPE of one pair in four lost": (
        "rope.cu", "angles[k / 2]", "k == 2 ? float2{1.0f, 0.0f} : angles[k / 2]", "logits"),
    "SwiGLU's slope without 1 - s": ("swiglu.cuh", "__fmaf_rn(gated, __fsub_rn(1.0f, s), s)", "s",
                                     "dfcw"),
    "one head of a group lost": (
        "attention.cu", "const int count = GROUP * head_tiles", "const int count = head_tiles",
        "dqkvw"),
    "a wrong group": ("attention.cu", "(h - h * GROUP) * HS", "(1 - h - h * GROUP) * HS", "dqkvw"),
    "Hopper: queries rotated in the epilogue, keys not": (
        "hopper/matmul_swiglu.cu", "8 * unit >= Q + KV", "8 * unit >= Q", "logits",
        "cuda-bf16-kernels"),
    "Hopper: gradients rotated by one angle in four": (
        "hopper/attention.cu", "k / 2 * 4 + threadIdx.x % 4]", "k / 2 * 4]", "dqkvw", "cuda-bf16"),
    "Hopper: up and gate swapped in the gradient": (
        "hopper/matmul_swiglu.cu", "swiglu_gradient(x[i], number(up, i), gate[i]",
        "swiglu_gradient(x[i], gate[i], number(up, i)", "dfcw", "cuda-bf16"),
}
LLAMA_CONFIG = train_llama3.Config(96, 391, 2, 4, 2, 128, 512, 200, 64, tied=0, theta=1e3, factor=8,
                                   original=32)


@functools.cache
def llama_case(precision):
    params = random_params(LLAMA_CONFIG, spread=0.05, ones=1.0)
    rng = np.random.default_rng(1)
    for name, row in params.table.items():
        if not row.vocabulary:
            getattr(params, name)[...] = rng.normal(row.ones, 0.15, row.shape)
    params = starting_weights(params, precision)
    x, y = rng.integers(0, LLAMA_CONFIG.V, (2, 3, 70), dtype=np.int32)
    return params, x, y, Yardstick(LLAMA_CONFIG, params, x, y, precision)


@pytest.mark.parametrize("fault", (*KERNEL_FAULTS.values(), *LLAMA_KERNEL_FAULTS.values()), ids=str)
def test_the_text_of_a_kernel_fault_is_there(fault):
    file, right, *_ = fault
    assert (ROOT / "kernels" / file).read_text().count(right) == 1


@pytest.mark.parametrize("fault", (None, *LLAMA_KERNEL_FAULTS))
@pytest.mark.gpu
def test_a_fault_in_a_kernel_of_llama_is_red(fault, gpu, tmp_path, monkeypatch, capsys):
    file, right, wrong, row, backend = (*LLAMA_KERNEL_FAULTS.get(fault, ("rope.cu", "", "", None)),
                                        "cuda")[:5]
    if "bf16" in backend and gpu.arch != "sm_90a":
        pytest.skip(f"{file}: for Hopper, this GPU is {gpu.arch}")
    plant_in_a_kernel(tmp_path, monkeypatch, file, right, wrong)
    params, x, y, yardstick = llama_case(precision_of(backend))
    assert (first_wrong(capsys, yardstick, BACKENDS[backend](LLAMA_CONFIG, params, x, y, SMOOTH))
            == row)


@pytest.mark.gpu
@pytest.mark.parametrize("backend, precision", (("cuda-tf32", "float32"), ("cuda-bf16", "tf32")))
def test_less_precision_than_asked_for_is_red(backend, precision, capsys):
    params, x, y, yardstick = gpu_case(precision)
    assert (first_wrong(capsys, yardstick, BACKENDS[backend](GPU_CONFIG, params, x, y, SMOOTH))
            == "logits")


# --------------------------------------------------------------------------------------------------
# FP8: with no GPU, a run with random errors, as the yardstick's; then Fp8's calls of the kernels
