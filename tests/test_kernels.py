"""Each GPU kernel against its NumPy function in float64, on random data and awkward shapes; outputs
are NaN before the call; and, with no GPU, that all compile and that every launch passes what its
kernel takes."""

import dataclasses
import functools
import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import llmc.gpu.compiler
import train_gpt2
import train_gpt2_cuda as cuda
import train_llama3
import train_llama3_cuda as llama_cuda
import train_speedrun
import train_speedrun_cuda as speedrun_cuda
from conftest import ROOT, on_stream
from fake_gpu import Array
from llmc.gpu.batch import SortedTokens, sort_tokens
from llmc.checkpoint import padded
from llmc.gpu.compiler import IMPORTING, KernelFile, compile_kernels, prepare_kernels
from llmc.gpu.device import cp, open_gpu, pinned_array, pointer, to_float32
from llmc.errors import UserError
from llmc.gpu.fp8 import LINEARS
from llmc.gpu.geometry import ENCODER_PIECE, blocks, hopper_matmul, kernel_files
from llmc.outliers import RECENT, z_score
from llmc.gpu.precision import Precision
from llmc.tensors import allocate, bf16_bits, bf16_to_float32
from llmc.gpu.trainer import STATIC_SHARED, Trainer, open_device
from llmc.gpu.shares import UPDATE_CHUNK, CHUNKS, Shares
from train_gpt2 import Config
from llmc.debugstate import check_tensor
from train_gpt2_cuda import adamw_update, add_gradients, global_norm

# --------------------------------------------------------------------------------------------------
# with no GPU

MODELS = [  # maxT, V, L, NH, C, Vp
    Config(1024, 50257, 1, 12, 768, 50304),  # GPT-2 124M
    Config(1024, 257, 2, 1, 64, 384),  # V % 8 of 1; one head
    Config(1024, 1003, 1, 25, 1600, 1024),  # V % 8 of 3; 25 heads; more than one warp for a row
    Config(1024, 131, 1, 3, 240, 256),  # heads of 80, 128, 96
    Config(1024, 131, 1, 2, 256, 256), Config(1024, 131, 1, 2, 192, 256),
]

PRECISIONS = {"tf32": Precision(), "float32": Precision(tf32=0), "bf16": Precision("bfloat16"),
              "bf16-float32-grads": Precision("bfloat16", 1, 1)}

LLAMAS = [  # maxT, V, L, NH, NKV, C, Vp, F, HS
    train_llama3.Config(1024, 50257, 1, 12, 4, 768, 50304, 2048, 64),  # l12
    train_llama3.Config(1024, 257, 2, 9, 3, 576, 384, 1536, 64),  # SmolLM2
    # heads of 16, fewer channels than C
    train_llama3.Config(1024, 1003, 1, 3, 1, 240, 1024, 200, 16, tied=0),
    train_llama3.Config(1024, 131, 1, 2, 2, 2048, 256, 512, 128, eps=1e-3),
]

SPEEDRUN = train_speedrun.Config(1024, 50257, 1, 6, 768, 50304)  # s12
COMPILED = "sm_90a", "bf16"  # others: make test-124M
OTHERS = [case for case in itertools.product(("sm_75", "sm_80", "sm_90a", "sm_100"), PRECISIONS)
          if case != COMPILED and (case[0] != "sm_75" or "bf16" not in case[1])]


def compile_file(file, arch):
    """The cubin of a KernelFile, in which all its kernels are."""
    with IMPORTING:
        pytest.importorskip("cuda.core")
    cubin = compile_kernels(file.name, arch, file.constants)
    assert (cubin[:4] == b"\x7fELF"
            and all(b".text." + kernel.encode() + b"\0" in cubin for kernel in file.kernels))
    return cubin


def cases_to_compile(arch, precision):
    """(architecture, layer, config) of each file that a test compiles."""
    # whose code depends on the gradients' dtype
    with_gradients = "encoder", "matmul", "column_sums", "update"
    layers = with_gradients if precision.float32_grads else cuda.GPT2.LAYERS
    cases = [(layer, MODELS[0]) for layer in layers if layer != "matmul"
             or hopper_matmul(precision, arch)]
    if arch == "sm_90a":  # of matmuls and attention, only the size of a head matters, the same here
        cases += [(layer, MODELS[2]) for layer, _ in cases if layer not in ("matmul", "attention")]
    if arch == "sm_80":
        cases += [("layernorm", Config(1024, 131, 1, C // 64, C, 256)) for C in (2560, 8192)]
    yield from ((cuda.GPT2, *case) for case in cases)
    # not in make test: it takes long
    if precision.float32_grads and hopper_matmul(precision, arch):
        yield speedrun_cuda.Speedrun, "matmul", SPEEDRUN
    if not precision.float32_grads:
        llamas = itertools.product(("rmsnorm", "rope", "swiglu", "classifier"), LLAMAS[1:])
        yield from ((llama_cuda.Llama3, *case) for case in llamas)
        classifier = (("classifier_capped",) if hopper_matmul(precision, arch)
                      else ("classifier", "logits_bias"))
        speedruns = ("rmsnorm", "qknorm", "gelu", *classifier, "muon")
        yield from ((speedrun_cuda.Speedrun, layer, SPEEDRUN) for layer in speedruns)
        yield llama_cuda.Llama3, "classifier", dataclasses.replace(LLAMAS[0], V=128256, Vp=128256)
        yield llama_cuda.Llama3, "attention", LLAMAS[2]
        yield llama_cuda.Llama3, "attention", dataclasses.replace(LLAMAS[2], NH=6, NKV=3, HS=80)


@pytest.mark.parametrize("arch, precision",
                         (COMPILED, *(pytest.param(*x, marks=pytest.mark.large) for x in OTHERS)))
def test_kernels_compile_with_no_gpu(arch, precision):
    precision = PRECISIONS[precision]
    files = [kernel_files(architecture, config, precision, arch)[layer]
             for architecture, layer, config in cases_to_compile(arch, precision)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda file: compile_file(file, arch), files))
    hopper = (kernel_files(cuda.GPT2, MODELS[0], precision, arch)["attention"].name
              == "hopper/attention")
    assert hopper == (arch == "sm_90a" and precision.bf16)


@pytest.mark.parametrize("arch, precision",
                         (("sm_75", "float32"), ("sm_80", "float32"), ("sm_80", "bf16")))
def test_other_products_of_tensor_cores_compile(arch, precision):
    """mma.cuh has each of its own; test_kernels_compile_with_no_gpu compiles the other two."""
    compile_file(kernel_files(llama_cuda.Llama3, LLAMAS[2], PRECISIONS[precision],
                              arch)["attention"], arch)


def test_blocks_fit_into_the_shared_memory_of_every_gpu():
    """Of attention: 64 KB before sm_80, 99 KB on sm_86 and sm_89, 227 KB on Hopper. Of layernorm,
    where rows are copied ahead: two blocks into a multiprocessor's, but for the longest rows."""
    for arch, limit in (("sm_75", 64 << 10), ("sm_86", 99 << 10), ("sm_90a", 227 << 10)):
        for HS, precision in itertools.product((64,) if arch == "sm_75" else (16, 64, 80, 128),
                                               PRECISIONS.values()):
            file = kernel_files(cuda.GPT2, Config(1024, 131, 1, 2, 2 * HS, 256), precision,
                                arch)["attention"]
            assert len(file.shared) == 3 and max(file.shared.values()) + STATIC_SHARED <= limit
    for arch, C, precision in itertools.product(("sm_80", "sm_86", "sm_90a"), (64, 1600, 8192),
                                                PRECISIONS.values()):
        file = kernel_files(cuda.GPT2, Config(1024, 131, 1, 1, C, 256), precision,
                            arch)["layernorm"]
        shared = file.shared["layernorm_backward"]
        assert shared <= (96 << 10) and (C == 8192 or 2 * shared <= 160 << 10)
        assert bool(shared) == (precision.bf16 and arch != "sm_86")


BOUNDS = (r"(?:__cluster_dims__\([^)]*\)"
          r" )?(?:BOUNDS\s+|__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?")
EXTERN = re.compile(rf'(?:extern "C" __global__ void {BOUNDS}|MATMUL )(\w+)\(([^)]*)\)')


@functools.cache
def signatures(name):
    """{kernel: [(type, name) of each parameter]} of <name>.cu, which is in kernels/ if it is not a
    whole path."""
    text = re.sub(r"//[^\n]*|#define[^\n]*", "", (ROOT / "kernels" / f"{name}.cu").read_text())
    words = {kernel: [re.sub(r"\bconst\b|__grid_constant__", "", p).split()
                      for p in parameters.split(",")]
             for kernel, parameters in EXTERN.findall(text)}
    return {kernel: [(" ".join(word[:-1]), word[-1]) for word in parameters]
            for kernel, parameters in words.items()}


def accepts(precision, kind, argument):
    """Whether a kernel's parameter takes this, as CuPy would pass it: arrays as pointers, numbers
    by value."""
    if not kind.endswith("*"):
        numbers = {"int": np.int32, "int64": np.int64, "float": np.float32, "double": np.float64}
        return type(argument) is numbers.get(kind, np.void)  # else a struct
    if not isinstance(argument, Array):
        return type(argument) is np.uint64  # a null pointer, or one to pinned memory
    types = {"element": precision.dtype, "residual_element": precision.residual,
             "gradient": precision.grads}
    stored = types.get(kind[:-1], kind[:-1])
    dtypes = {"bfloat16": "u2", "float16": "f2", "float32": "f4", "float": "f4", "int": "i4",
              "int64": "i8"}
    # bytes stand for anything
    return stored not in dtypes or argument.dtype in (dtypes[stored], "u1")


def check_launches(launches, gpu, precision, parameters):
    """Number and types of arguments, grids and blocks, but of cuBLASLt. parameters: kernel ->
    [(type, name)]."""
    for launch in (launch for launch in launches if launch.name != "cublaslt"):
        assert 1 <= np.prod(launch.block) <= 1024 and launch.shared <= gpu.shared
        assert (all(type(n) is int and n >= 1 for n in launch.grid)
                and max((*launch.grid[1:], 1)) < 2**16)
        expected = parameters[launch.name]
        assert len(launch.arguments) == len(expected), launch.name
        for (kind, name), argument in zip(expected, launch.arguments):
            fits = name == "batch" or accepts(precision, kind, argument)  # words of any type
            assert fits, f"{launch.name}: {kind} {name} is given {type(argument)}"


@pytest.mark.parametrize("recompute", (0, 1, 2))
@pytest.mark.parametrize("arch, precision, library", [
    ("sm_75", "float32", "auto"), *itertools.product(("sm_80", "sm_90a"), PRECISIONS, ("auto",)),
    ("sm_90a", "fp8", "auto"),
    *itertools.product(("sm_90a",), ("bf16", "bf16-float32-grads"), ("kernels", "cublaslt"))])
@pytest.mark.parametrize("architecture, config", ((cuda.GPT2, Config(64, 257, 2, 3, 192, 384)),
    (llama_cuda.Llama3, train_llama3.Config(64, 257, 2, 4, 2, 192, 384, 384, 48, tied=0)),
    # QKV: two narrow tiles
    (llama_cuda.Llama3, train_llama3.Config(64, 257, 2, 3, 1, 192, 384, 384, 64, tied=0)),
    (speedrun_cuda.Speedrun, train_speedrun.Config(64, 257, 2, 3, 192, 384))),
    ids=("gpt2", "llama", "narrow", "speedrun"))
def test_every_launch_passes_what_its_kernel_takes(fake_gpu, architecture, config, arch, precision,
                                                   library, recompute):
    """A step with accumulation, on a fake GPU; every kernel that is loaded is launched in it, but
    in FP8."""
    T = 40 if recompute else 32
    gpu = fake_gpu.gpu._replace(arch=arch)
    precision = {"fp8": Precision("bfloat16", fp8=True), **PRECISIONS}[precision]
    settings = architecture.Settings(
        B=3, T=T, total_batch_size=6 * T, dtype="fp8" if precision.fp8 else precision.dtype,
        tf32=precision.tf32,
        float32_grads=precision.float32_grads, grad_clip=1.0, recompute=recompute, graph=0)
    _, matmul = open_device(architecture, gpu, config, precision, library)
    trainer = Trainer(architecture, config, settings, matmul,
                      allocate(architecture.parameter_table(config)))
    batch = np.ones((2, 3, T), np.int32)
    trainer.compute_gradients(*batch)
    assert not precision.fp8 or trainer.linears.fp8.updates == 1, "it has found scales"
    trainer.prepare()
    fake_gpu.launches.clear()
    reported = trainer.end_step(trainer.begin_step([batch, batch], 1e-3))
    assert reported == (0.0, 0.0, 0.001, None, None, (0, 0) if precision.fp8 else None)
    files = kernel_files(architecture, config, precision, arch, library).values()
    parameters = {kernel: types for file in files
                  for kernel, types in signatures(file.name).items()}
    check_launches(fake_gpu.launches, gpu, precision, parameters)
    if precision.fp8:
        multiplied = sum(launch.name.startswith("matmul_fp8") for launch in fake_gpu.launches)
        assert multiplied == 6 * (len(LINEARS) * config.L + 1), "all are in 8 bits"
        fake_gpu.launches.clear()
        trainer.forward(*batch)
        assert not any(re.search("fp8|quantize", launch.name) for launch in fake_gpu.launches)
        return
    launched = {launch.name for launch in fake_gpu.launches}
    assert (("cublaslt" in launched)
            == (matmul.cublaslt is not None or architecture is speedrun_cuda.Speedrun))
    unused = {"round_weights", "transpose", "gelu_forward", "gelu_backward"}
    unused |= {"matmul_backward_weight"} if library == "auto" else set()
    if architecture is llama_cuda.Llama3:
        unused |= {"encoder_backward_wpe", "matmul_forward_gelu", "matmul_backward_inp_gelu"}
        unused |= {"matmul_forward_rope"} if config.NH == 3 else set()  # the narrow one is
        unused |= {"rope_forward", "swiglu_forward", "swiglu_backward"} if matmul.kernels else set()
    if architecture is speedrun_cuda.Speedrun:
        unused |= {"encoder_backward_wpe"}
    loaded = {kernel for file in files for kernel in file.kernels
              if not kernel.endswith(("narrow", "fp8"))}
    assert loaded - launched <= unused


def test_the_cache(tmp_path, monkeypatch):
    """What is there is not compiled again; other constants, or another source, are other files."""
    pytest.importorskip("cuda.core")
    (tmp_path / "a.cu").write_text('extern "C" __global__ void a() {}\n')
    monkeypatch.setattr(llmc.gpu.compiler, "KERNEL_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("TRAIN_GPT2_CACHE", str(tmp_path / "new" / "cache"))
    file = KernelFile("a", ("a",), {"N": 1})
    (path,), compiled = prepare_kernels("sm_80", [file])
    assert compiled == 1 and prepare_kernels("sm_80", [file]) == ([path], 0)
    assert prepare_kernels("sm_80", [file, file._replace(constants={"N": 2})])[1] == 1
    (tmp_path / "a.cu").write_text('extern "C" __global__ void a() { __syncthreads(); }\n')
    assert (prepare_kernels("sm_80", [file])[1] == 1
            and len(os.listdir(tmp_path / "new" / "cache")) == 3)
    monkeypatch.setenv("TRAIN_GPT2_CACHE", str(tmp_path / "a.cu" / "cache"))
    error = pytest.raises(UserError, prepare_kernels, "sm_80", [file])
    assert error.match("a.cu/cache: cannot be written.*TRAIN_GPT2_CACHE=DIR")


def skewed(V, shape, seed=0):
    """Tokens as in text: a fifth of the positions have one of them, some have another."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, shape, dtype=np.int32)
    choice = rng.random(shape)
    tokens[choice < 0.2] = V // 2
    tokens[choice > 0.9] = V - 1
    return tokens


@pytest.mark.parametrize("tokens", (
    *(np.random.default_rng(0).integers(0, V, (3, 97), dtype=np.int32) for V in (3, 257, 70000)),
    skewed(257, (4, 1024)), np.arange(1000, dtype=np.int32)[None] // (ENCODER_PIECE + 1),
    *(np.full((1, n), 5, np.int32) for n in (1, ENCODER_PIECE, ENCODER_PIECE + 1, 1000)),
), ids=("V3", "V257", "V70000", "skewed", "all-cut", "one", "a-piece", "a-piece-and-one",
        "all-equal"))
def test_sort_tokens(tokens):
    N = tokens.size
    order, begins, piece_tokens = (np.full(size, -99, np.int32) for size in (N, N + 1, N))
    sort_tokens(order, begins, piece_tokens, tokens)
    positions = {token: np.flatnonzero(tokens == token).tolist()
                 for token in np.unique(tokens).tolist()}
    cut = [token for token in positions if len(positions[token]) > ENCODER_PIECE]
    expected = [(~token if token in cut else token, positions[token][i : i + ENCODER_PIECE])
                for token in (*cut, *(token for token in positions if token not in cut))
                for i in range(0, len(positions[token]), ENCODER_PIECE)]
    pieces = len(expected)
    got = zip(piece_tokens[:pieces].tolist(), np.split(order, begins[1:pieces]))
    assert [(token, piece.tolist()) for token, piece in got] == expected
    assert begins[0] == 0 and np.all(begins[pieces:] == N) and np.all(piece_tokens[pieces:] == 0)
    assert (np.count_nonzero(piece_tokens < 0)
            <= blocks(2 * N, ENCODER_PIECE)), "rows of wte_partials"


# --------------------------------------------------------------------------------------------------
# with a GPU

# The largest error allowed, as a fraction of the largest value of the reference. float32 rounds to
# 6e-8, sums of n numbers in any order to some sqrt(n) of that; TF32 rounds operands to 5e-4;
# bfloat16 rounds what is stored to 2e-3, and in attention what one matmul hands to the next, too;
# half precision rounds the residual stream to 2.5e-4.
EXACT, SUMS, TF32, BF16, BF16_TWICE, HALF = 1e-6, 5e-6, 2e-3, 4e-3, 1e-2, 5e-4

SHAPES = [(1, 1), (3, 97), (1, 1000), (3, 1024)]
MATMULS = {}


CASES = ([(config, name) for config in MODELS for name in ("tf32", "bf16")]
         + [(MODELS[3], "bf16-float32-grads")])


@pytest.fixture(params=CASES,
                ids=lambda case: f"C{case[0].C}xNH{case[0].NH}xV{case[0].V}-{case[1]}")
def device(request, gpu):
    config, precision = request.param
    return get_device(gpu, config, PRECISIONS[precision])


def get_device(gpu, config, precision, portable=False):
    """A Device for one model, made once; `portable` without the instructions that only this
    generation of GPUs has."""
    return get_matmul(gpu, config, precision, portable).device


def get_matmul(gpu, config, precision, portable=False, matmul="auto"):
    key = config, precision, portable, matmul
    if precision.bf16 and int(gpu.arch[3:].rstrip("a")) < 80:
        pytest.skip(f"{gpu.arch} has no bfloat16")
    if key not in MATMULS:
        gpu = open_gpu("sm_80" if portable else "native")
        architecture = {Config: cuda.GPT2, train_speedrun.Config: speedrun_cuda.Speedrun}.get(
            type(config), llama_cuda.Llama3)
        device, made = open_device(architecture, gpu, config, precision, matmul)
        device.config = config
        device.precision = precision  # for the tests
        with device.stream:
            made.allocate()
        MATMULS[key] = made
    on_stream(MATMULS[key].device)
    return MATMULS[key]


def random(*shape, seed=0, spread=1.0, mean=0.0, dtype="float32"):
    """float32 normal numbers, others in each run of the tests; those that this dtype has."""
    rng = np.random.default_rng((seed, os.getpid()))
    numbers = rng.standard_normal(shape, dtype=np.float32) * np.float32(spread) + np.float32(mean)
    return (bf16_to_float32(bf16_bits(numbers)) if dtype == "bfloat16"
            else numbers.astype(dtype).astype(np.float32))


def on_gpu(*arrays, dtype=None):
    """Copies on the GPU, in this dtype."""
    arrays = [cp.asarray(bf16_bits(array) if dtype == "bfloat16"
                         else array.astype(dtype or array.dtype))
              for array in arrays]
    return arrays if len(arrays) > 1 else arrays[0]


def unwritten(*shape, dtype="float32"):
    """NaN everywhere."""
    return (cp.full(shape, 0xFFFF, np.uint16) if dtype == "bfloat16"
            else cp.full(shape, np.nan, dtype))


def assert_close(tolerance, **pairs):
    """name=(got on the GPU, expected). What is stored in bfloat16 or in halves is rounded."""
    for name, (got, expected) in pairs.items():
        allowed = max(tolerance, {"uint16": BF16, "float16": HALF}.get(got.dtype.name, 0.0))
        assert check_tensor(name, to_float32(got), expected,
                            allowed * max(float(np.abs(expected).max()), 1e-30)), name


def partial_rows(device, B, T):
    return cuda.partial_rows(B, T, device.sm_count, device.geometry)


def wide(*arrays):
    return [array.astype(np.float64) for array in arrays]


@pytest.mark.parametrize("B, T", [*SHAPES, (16, 1024)])
def test_encoder(device, B, T):
    """With learned positions, and without."""
    maxT = device.config.maxT
    V = device.config.V
    C = device.config.C
    Vp = device.config.Vp
    inp = skewed(V, (B, T), seed=T)
    e = device.precision.dtype
    g = device.precision.grads
    wte = random(Vp, C, seed=1, dtype=e)
    wpe = random(maxT, C, seed=2, dtype=e)
    dout = random(B, T, C, seed=3, dtype=e)
    dwte = random(Vp, C, seed=4, dtype=g)
    order_begins_tokens = [np.zeros(size, np.int32) for size in (B * T, B * T + 1, B * T)]
    sort_tokens(*order_begins_tokens, inp)
    for with_wpe in (True, False):
        out = unwritten(B, T, C, dtype=device.precision.residual)
        cuda.encoder_forward(device, out, on_gpu(inp), on_gpu(wte, dtype=e), on_gpu(wpe, dtype=e)
                             if with_wpe else None, B, T, C)
        expected = np.empty((B, T, C))
        train_gpt2.encoder_forward(expected, inp,
                                   *wide(wte, wpe if with_wpe else np.zeros_like(wpe)), B, T, C)
        assert_close(EXACT, out=(out, expected))

        got_wte = on_gpu(dwte, dtype=g)
        got_wpe = unwritten(maxT, C, dtype=g) if with_wpe else None
        partials = unwritten(partial_rows(device, B, T).wte, C)
        cuda.encoder_backward(device, got_wte, got_wpe, partials, on_gpu(dout, dtype=e),
                              SortedTokens(*on_gpu(*order_begins_tokens)), B, T, C)
        expected_wte = dwte.astype(np.float64)
        expected_wpe = np.empty((maxT, C)) if with_wpe else None
        train_gpt2.encoder_backward(expected_wte, expected_wpe, *wide(dout), inp, B, T, C)
        assert_close(SUMS, dwte=(got_wte, expected_wte),
                     **({"dwpe": (got_wpe, expected_wpe)} if with_wpe else {}))


@pytest.mark.parametrize("B, T", SHAPES)
def test_residual_layernorm(device, B, T):
    C = device.config.C
    e = device.precision.dtype
    residual_dtype = device.precision.residual
    inp1 = random(B, T, C, seed=1, mean=1, dtype=residual_dtype)
    inp2 = random(B, T, C, seed=2, mean=1, dtype=e)
    weight = random(C, seed=3, dtype=e)
    bias = random(C, seed=4, dtype=e)
    for both in (True, False):
        residual = unwritten(B, T, C, dtype=residual_dtype)
        out = unwritten(B, T, C, dtype=e)
        mean = unwritten(B, T)
        rstd = unwritten(B, T)
        added = on_gpu(inp2, dtype=e) if both else None
        cuda.residual_layernorm_forward(device, residual if both else None, out, mean, rstd,
                                        on_gpu(inp1, dtype=residual_dtype), added,
                                        *on_gpu(weight, bias, dtype=e), B, T, C)
        total = inp1.astype(np.float64) + (inp2 if both else 0)
        if both:
            assert_close(EXACT, residual=(residual, total))
            # the layernorm is that of what is stored
            total = to_float32(residual).astype(np.float64)
        expected = np.empty((B, T, C)), np.empty((B, T)), np.empty((B, T))
        train_gpt2.layernorm_forward(*expected, total, *wide(weight, bias), B, T, C)
        assert_close(SUMS, out=(out, expected[0]), mean=(mean, expected[1]),
                     rstd=(rstd, expected[2]))


def test_the_residual_stream_saturates(device):
    """Beyond the largest half there is that; inf and NaN stay, in what follows from them, too."""
    if device.precision.residual != "float16":
        pytest.skip("a float32 stream does not saturate")
    C = device.config.C
    e = device.precision.dtype
    inp1 = np.full((1, 1, C), 6e4, np.float32)
    inp2 = np.zeros((1, 1, C), np.float32)
    ones = np.ones(C, np.float32)
    inp1[..., 1] = -6e4
    inp2[..., :4] = (8192, -8192, np.inf, np.nan)
    residual = unwritten(1, 1, C, dtype="float16")
    out = unwritten(1, 1, C, dtype=e)
    mean = unwritten(1, 1)
    rstd = unwritten(1, 1)
    cuda.residual_layernorm_forward(device, residual, out, mean, rstd,
                                    on_gpu(inp1, dtype="float16"),
                                    on_gpu(inp2, dtype=e), *on_gpu(ones, ones, dtype=e), 1, 1, C)
    wanted = np.array([65504, -65504, np.inf, np.nan, 6e4], np.float16)
    assert np.array_equal(residual.get()[0, 0, :5], wanted, equal_nan=True)
    assert not np.isfinite(to_float32(out)).any()
    cuda.residual_layernorm_forward(device, residual, out, mean, rstd,
                                    on_gpu(inp1, dtype="float16"),
                                    on_gpu(0 * inp1, dtype=e), *on_gpu(ones, ones, dtype=e), 1, 1,
                                    C)
    assert np.isfinite(to_float32(out)).all()

    wte = np.full((device.config.Vp, C), 6e4, np.float32)
    wpe = np.full((device.config.maxT, C), 6e4, np.float32)
    wte[0, :2] = -6e4, np.inf
    wpe[0, 0] = -6e4
    encoded = unwritten(1, 1, C, dtype="float16")
    cuda.encoder_forward(device, encoded, on_gpu(np.zeros((1, 1), np.int32)),
                         *on_gpu(wte, wpe, dtype=e), 1, 1, C)
    assert np.array_equal(encoded.get()[0, 0, :3], np.array([-65504, np.inf, 65504], np.float16))


@pytest.mark.parametrize("B, T", SHAPES)
def test_layernorm_backward(device, B, T):
    C = device.config.C
    e = device.precision.dtype
    g = device.precision.grads
    dinp, dout = (random(B, T, C, seed=seed, dtype=e) for seed in (1, 2))
    inp = random(B, T, C, seed=3, dtype=device.precision.residual)
    weight = random(C, seed=4, dtype=e)
    mean = inp.mean(axis=-1, dtype=np.float64).astype(np.float32)
    rstd = (1 / np.sqrt(inp.var(axis=-1, dtype=np.float64) + 1e-5)).astype(np.float32)
    expected = dinp.astype(np.float64)
    dweight = np.empty(C)
    dbias = np.empty(C)
    train_gpt2.layernorm_backward(expected, dweight, dbias, *wide(dout, inp, weight, mean, rstd), B,
                                  T, C)
    most = partial_rows(device, B, T).layernorm
    few = min(most, 3)  # blocks, each of which comes to many rows
    for add_residual, rows in ((1, most), (0, few), (1, few)):
        got = on_gpu(dinp, dtype=e) if add_residual else unwritten(B, T, C, dtype=e)
        partials = unwritten(rows, 3 * C)
        sums = unwritten(3, C, dtype=g)
        cuda.layernorm_backward(device, got, partials, on_gpu(dout, dtype=e),
                                on_gpu(inp, dtype=device.precision.residual),
                                on_gpu(weight, dtype=e), *on_gpu(mean, rstd), add_residual, B, T, C)
        cuda.column_sums(device, [(partials, tuple(sums))])
        total = expected - (0 if add_residual else dinp)
        assert_close(SUMS, dinp=(got, total), dweight=(sums[0], dweight), dbias=(sums[1], dbias))
        # sums of the errors of dinp, which may cancel in the value
        assert_close(20 * SUMS, total=(sums[2], total.sum(axis=(0, 1))))


@pytest.mark.parametrize("B, T", SHAPES)
def test_gelu(device, B, T):
    C = device.config.C
    e = device.precision.dtype
    g = device.precision.grads
    inp = random(B, T, 4 * C, seed=1, spread=3, dtype=e)
    dout = random(B, T, 4 * C, seed=2, dtype=e)
    out = unwritten(B, T, 4 * C, dtype=e)
    expected = np.empty((B, T, 4 * C))
    expected_dinp = np.empty((B, T, 4 * C))
    cuda.gelu_forward(device, out, on_gpu(inp, dtype=e), B * T, 4 * C)
    train_gpt2.gelu_forward(expected, *wide(inp), inp.size)
    train_gpt2.gelu_backward(expected_dinp, *wide(inp, dout), inp.size)
    assert_close(EXACT, out=(out, expected))
    forward = out
    for again, in_place in ((True, False), (False, True)):
        out = unwritten(B, T, 4 * C, dtype=e)
        dbias = unwritten(4 * C, dtype=g)
        partials = unwritten(partial_rows(device, B, T).gelu, 4 * C)
        dout_gpu = on_gpu(dout, dtype=e)
        dinp = dout_gpu if in_place else unwritten(B, T, 4 * C, dtype=e)
        cuda.gelu_backward(device, dinp, partials, out if again else None, on_gpu(inp, dtype=e),
                           dout_gpu, B * T, 4 * C)
        cuda.column_sums(device, [(partials, (dbias,))])
        assert_close(EXACT, dinp=(dinp, expected_dinp))
        assert_close(20 * SUMS, dbias=(dbias, expected_dinp.sum(axis=(0, 1))))
        if again:
            assert np.array_equal(out.get(), forward.get()), "recomputing changes no bit"


@pytest.mark.parametrize("B, T", SHAPES[:3])
def test_classifier(device, B, T):
    check_classifier(device, B, T)


@pytest.mark.parametrize("config, portable",
                         ((Config(1024, 100001, 1, 2, 128, 100096), False), (MODELS[0], True),
                          (Config(1024, 120001, 1, 2, 128, 120064), False),  # in registers: a part
                          (Config(1024, 128256, 1, 2, 128, 128256), False)))
def test_classifier_with_one_row_on_chip_or_none(gpu, config, portable):
    """In bfloat16; in float32, there is never room for two of 50304. Without thread block clusters,
    for none."""
    device = get_device(gpu, config, PRECISIONS["bf16"], portable)
    assert device.geometry.CLASSIFIER_ROWS_ON_CHIP == (gpu.arch == "sm_90a" and not portable)
    check_classifier(device, 3, 97)


@pytest.mark.parametrize("V", (257, 8193, 16384, 17000, 24577))
def test_classifier_of_few_parts(gpu, monkeypatch, V):
    """Rows of one to seven parts, the last one short; the blocks of one multiprocessor take all
    rows."""
    for precision in ("tf32", "bf16"):
        config = Config(1024, V, 1, 1, 64, padded(V))
        device = get_device(gpu, config, PRECISIONS[precision])
        monkeypatch.setattr(device, "sm_count", 1)
        check_classifier(device, 3, 97)


@pytest.mark.parametrize("kind", ("tf32", "bf16", "bf16, portable"))
def test_classifier_of_what_is_not_finite(gpu, kind):
    """NaN and infinity are not swallowed, and stay in their row; -infinity has no weight."""
    precision, *portable = kind.split(", ")
    device = get_device(gpu, MODELS[2], PRECISIONS[precision], bool(portable))
    V = device.config.V
    Vp = device.config.Vp
    e = device.precision.dtype
    logits = random(1, 6, Vp, dtype=e)
    targets = np.full((1, 6), 3, np.int32)
    logits[0, 0, V - 1] = np.nan
    logits[0, 1] = np.nan
    logits[0, 2, 7] = np.inf
    logits[0, 3] = -np.inf
    logits[0, 4, 5] = -np.inf
    losses = unwritten(1, 6)
    got = on_gpu(logits, dtype=e)
    losses[...] = 1.0
    cuda.classifier(device, losses, got, on_gpu(targets), 1.0, 1, 1, 6)
    gradient = to_float32(got)[0, :, :V]
    assert np.isnan(losses.get()[0, :4]).all() and np.isfinite(losses.get()[0, 4:]).all()
    assert (np.isnan(gradient[:3]).all() and np.isfinite(gradient[4:]).all()
            and gradient[4, 5] == 0.0)


def check_classifier(device, B, T, dloss=None):
    """Returns dlogits, in FP8 unchecked, and what they should be, times dloss."""
    V, Vp = device.config.V, device.config.Vp
    e = device.precision.dtype
    logits = random(B, T, Vp, seed=1, spread=4, dtype=e)
    targets = np.random.default_rng(T).integers(0, V, (B, T), dtype=np.int32)
    targets.flat[0] = V - 1
    targets.flat[-1] = 0
    probs = np.empty((B, T, V))
    expected = np.empty((B, T))
    dlogits = np.empty((B, T, V))
    train_gpt2.softmax_forward(probs, *wide(logits[..., :V]), B, T, V)
    train_gpt2.crossentropy_forward(expected, wide(logits[..., :V])[0], probs, targets, B, T, V)
    dloss = dloss or 1.0 / (B * T)
    train_gpt2.crossentropy_softmax_backward(dlogits, np.full((B, T), dloss), probs, targets, B, T,
                                             V)
    logits[..., V:] = np.nan  # whatever stands in the padding has no part in it
    for write in (0, 1):
        losses = unwritten(B, T)
        got = on_gpu(logits, dtype=e)
        cuda.classifier(device, losses, got, on_gpu(targets), dloss, write, B, T)
        assert_close(SUMS, losses=(losses, expected))
        if not write:
            assert np.array_equal(to_float32(got), logits, equal_nan=True)
    if not device.precision.fp8:
        assert_close(SUMS, dlogits=(got[..., :V], dlogits))
        assert not got[..., V:].any(), "the padding's gradient is 0"
    return got, dlogits


def chunks_of(count, decay=0.0, decayed=0, at_random=0):
    """CHUNKS, on the GPU, of `count` parameters of one GPU, of which the first `decayed` decay."""
    chunks = np.zeros(blocks(count, UPDATE_CHUNK), CHUNKS)
    chunks["local"] = chunks["flat"] = chunks["received"] = UPDATE_CHUNK * np.arange(chunks.size)
    chunks["count"], chunks["index"] = np.minimum(UPDATE_CHUNK,
                                                  count - chunks["flat"]), np.arange(chunks.size)
    chunks["decay"] = np.where(chunks["flat"] < decayed, decay, 0.0)
    chunks["rate"] = 1.0
    chunks["at_random"] = at_random
    return on_gpu(chunks.view(np.uint8))


@pytest.mark.parametrize("precision", ("tf32", "bf16", "bf16-float32-grads"))
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_add_gradients(gpu, ranks, precision):
    """Three micro-batches in the order of ranks, to the bit; global_norm and adamw_update add the
    last."""
    config = MODELS[1]
    precision = PRECISIONS[precision]
    device = get_device(gpu, config, precision)
    shares = Shares(train_gpt2.parameter_table(config), ranks)
    grads = random(3, ranks, shares.size, dtype=precision.grads)
    partials = np.zeros(shares.chunks(0)[2])
    squares = 0.0
    for rank in range(ranks):
        chunks = on_gpu(shares.chunks(rank)[0].view(np.uint8))
        sums = unwritten(shares.share_size(rank))
        m, v = cp.zeros((2, shares.size), np.float32)
        parts = cp.zeros(partials.size, np.float32)
        control = cp.zeros(5, np.int64)
        control.view(np.float32)[7] = 1.0  # grad_scale
        for batch in range(3):
            received = np.full(shares.received_size(), np.nan, grads.dtype)
            for piece in shares.parts_of(rank):
                arrived = grads[batch, :, piece.begin : piece.begin + piece.size]
                received[piece.received : piece.received + arrived.size] = arrived.reshape(-1)
            received = on_gpu(received, dtype=precision.grads)
            if batch < 2:
                add_gradients(device, sums, received, chunks, ranks, batch == 0)
                expected = functools.reduce(np.add, grads[: batch + 1].reshape(-1, shares.size))
                assert np.array_equal(sums.get(), shares.take(expected, rank))
        global_norm(device, parts, sums, received, chunks, ranks)
        expected = functools.reduce(np.add, grads.reshape(-1, shares.size))
        params = on_gpu(random(shares.size), dtype=precision.dtype)
        adamw_update(device, params, None, m, v, sums, received, chunks, ranks, control, 0.0, 0.5,
                     0)
        assert np.array_equal(m.get()[: sums.size], shares.take(expected, rank)), "beta1 is 0"
        assert not partials[np.flatnonzero(parts.get())].any(), "a chunk has one owner"
        partials += parts.get()
        squares = (expected.astype(np.float64) ** 2).sum()
    assert abs(partials.sum() - squares) <= 1e-5 * squares


@pytest.mark.parametrize("grad_clip", (0.0, 1.0))
@pytest.mark.parametrize("precision, has_master", (("tf32", False), ("bf16", True), ("bf16", False),
                                                   ("bf16-float32-grads", True)))
def test_update(gpu, grad_clip, precision, has_master):
    """loss_mean, global_norm, prepare_update and three steps of adamw_update, with two different
    weight decays."""
    device = get_device(gpu, MODELS[1], PRECISIONS[precision])
    e = device.precision.dtype
    g = device.precision.grads
    count = 8 * 123457
    learning_rate = 1e-3
    beta1 = 0.9
    beta2 = 0.95
    eps = 1e-8
    decay = 0.1
    master = random(count, seed=1, dtype="float32" if has_master else e)
    m = random(count, seed=2, spread=0.1)
    v = random(count, seed=3) ** 2
    grads = random(count, seed=4, dtype=g)
    losses = random(3, 97, seed=5) ** 2
    split = 3 * UPDATE_CHUNK
    expected = wide(master, m, v)
    params, *on = on_gpu(master, dtype=e), *on_gpu(master, m, v)
    chunks = chunks_of(count, decay, split)
    control = cp.zeros(5, np.int64)
    loss = unwritten(1)
    partials = unwritten(blocks(count, UPDATE_CHUNK))
    reports = pinned_array(32).view(np.float32).reshape(2, 4)
    rate = on_gpu(np.float32([learning_rate]))
    norm = float(np.sqrt((grads.astype(np.float64) ** 2).sum()))
    scale = grad_clip / norm if grad_clip and norm > grad_clip else 1.0
    for step in (1, 2, 3, 4):
        reports[:] = np.nan
        cuda.loss_mean(device, loss, on_gpu(losses), 1.0 / losses.size, losses.size)
        global_norm(device, partials, None, on_gpu(grads, dtype=g), chunks, 1)
        if step == 4:
            (partials if grad_clip else loss).fill(np.nan)  # the weights must stay as they are
        device.launch("prepare_update", (1,), (256,), control, pointer(reports), loss, partials,
                      rate,
                      np.float64(beta1), np.float64(beta2), np.float64(eps), grad_clip, 1,
                      partials.size, None, 0.0, 0.0)
        adamw_update(device, params, on[0] if has_master else None, on[1], on[2], None,
                     on_gpu(grads, dtype=g),
                          chunks, 1, control, beta1, beta2, 0)
        device.stream.synchronize()
        reported = reports[(step - 1) % 2]
        if step == 4:
            assert np.isnan(reported[1 if grad_clip else 0])
            break
        assert abs(reported[1] - norm) <= 1e-5 * norm
        assert abs(reported[0] - losses.mean()) <= 1e-6 * losses.mean()
        for part, d in ((slice(0, split), decay), (slice(split, count), 0.0)):
            train_gpt2.adamw_update(*(array[part] for array in expected), *wide(grads[part]),
                                    learning_rate, beta1,
                                    beta2, eps, d, scale, step, part.stop - part.start)
    assert control.get()[:2].tolist() == [3, 4], "updates done, steps begun"
    assert_close(SUMS, m=(on[1], expected[1]), v=(on[2], expected[2]))
    exact = e == "float32" or has_master  # else rounded three times
    assert_close(SUMS if exact else BF16_TWICE, params=(params, expected[0]))
    if has_master:
        assert_close(SUMS, master=(on[0], expected[0]))
        assert np.array_equal(params.get(),
                              bf16_bits(on[0].get())), "the weights are the masters, rounded to nearest"


def test_outliers_are_skipped(gpu):
    """z-scores are outliers.py's, and an update that has too large a one changes nothing."""
    device = get_device(gpu, MODELS[1], PRECISIONS["tf32"])
    losses, norms = (np.float32(3.0) + random(300, seed=seed, spread=0.1) for seed in (1, 2))
    losses[[150, 299]] = 30.0
    norms[[200, 250]] = (40.0, np.inf)
    count = 1000
    expected = np.zeros(2, RECENT)
    on_host = pinned_array(32).view(np.float32).reshape(2, 4)
    control = cp.zeros(5, np.int64)
    recent = cp.zeros(2 * RECENT.itemsize, np.uint8)
    rate = on_gpu(np.float32([1e-3]))
    chunks = chunks_of(count)
    params, m, v, grads = on_gpu(*(random(count, seed=seed) ** 2 for seed in range(4)))
    skipped = []
    for step, (loss, norm) in enumerate(zip(losses, norms)):
        before = params.get()
        device.launch("prepare_update", (1,), (256,), control, pointer(on_host),
                      on_gpu(np.float32([loss])),
                      on_gpu(np.float32([norm]) ** 2), rate, np.float64(0.9), np.float64(0.95),
                      np.float64(1e-8), 0.0, 1, 1, recent, 5.0, 7.0)
        adamw_update(device, params, None, m, v, None, grads, chunks, 1, control, 0.9, 0.95, 0)
        device.stream.synchronize()
        report = on_host[step % 2]
        z_scores = [z_score(row, x) for row, x in zip(expected, report[:2])]
        np.testing.assert_allclose(report[2:], z_scores, rtol=1e-5, atol=1e-6)
        assert recent.get().tobytes() == expected.tobytes()
        if np.array_equal(before, params.get()):
            skipped.append(step)
    assert skipped == [150, 200, 250, 299] and control.get()[0] == 300


def test_stochastic_rounding(gpu):
    """Each weight becomes one of its two neighbours, their mean is the weight; a seed repeats its
    choices."""
    device = get_device(gpu, MODELS[1], PRECISIONS["bf16"])
    count = 8 * 20000
    # three tenths of the way from one neighbour to the next
    numbers = np.full(count, 1.0 + 0.3 * 2.0**-7, np.float32)
    numbers[count // 2 :] *= -1
    # learning rate 0: the weights stay what they are, but for the rounding
    control = cp.zeros(5, np.int64)
    zeros = cp.zeros(count, np.uint16)

    def rounded(seed, step, at_random=0):
        params = unwritten(count, dtype="bfloat16")
        master = on_gpu(numbers)
        m = cp.zeros(count, np.float32)
        v = cp.ones(count, np.float32)
        control[0] = step
        chunks = chunks_of(count, at_random=at_random)
        adamw_update(device, params, master, m, v, None, zeros, chunks, 1, control, 0.5, 0.5, seed)
        assert np.array_equal(master.get(), numbers, equal_nan=True)
        return to_float32(params)

    first = rounded(7, 1)
    assert set(np.abs(first).tolist()) == {1.0, 1.0 + 2.0**-7}
    for part in (first[: count // 2], first[count // 2 :]):
        assert abs(np.mean(np.abs(part) > 1.0) - 0.3) < 5 * (0.21 / part.size) ** 0.5
    assert np.array_equal(first, rounded(7, 1))
    for other in (rounded(8, 1), rounded(7, 2)):
        assert (abs(np.mean(first == other) - 0.58)
                < 0.02), "other seeds and steps choose independently"
    assert np.array_equal(rounded(0, 1), bf16_to_float32(bf16_bits(numbers))), "seed 0: to nearest"
    assert abs(np.mean(np.abs(rounded(0, 1, at_random=1)) > 1.0) - 0.3) < 0.01, "but for layernorms"
    numbers[:] = np.resize(np.float32([np.nan, np.inf, -np.inf]), count)
    assert np.array_equal(rounded(7, 1), numbers, equal_nan=True), "what is not finite stays so"


# --------------------------------------------------------------------------------------------------
# Llama 3's; attention, SwiGLU in matmuls, text and the trainer have tests of their own

of_llama = pytest.mark.parametrize("device, B, T", [
    (case, *shape)
    for case in (*itertools.product(LLAMAS, ("tf32", "bf16")), (LLAMAS[2], "bf16-float32-grads"))
    for shape in ((1, 1), (3, 97), (3, 1024))], indirect=["device"],
    ids=lambda x: x if isinstance(x, int) else f"C{x[0].C}xNKV{x[0].NKV}xF{x[0].F}-{x[1]}")


@of_llama
@pytest.mark.parametrize("both", (True, False))
def test_residual_rmsnorm(device, B, T, both):
    config = device.config
    e = device.precision.dtype
    residual_dtype = device.precision.residual
    C, eps = config.C, config.eps
    inp1 = random(B, T, C, seed=1, mean=1, dtype=residual_dtype)
    inp2 = random(B, T, C, seed=2, mean=1, dtype=e)
    weight = random(C, seed=3, dtype=e)
    out = unwritten(B, T, C, dtype=e)
    rstd = unwritten(B, T)
    residual = unwritten(B, T, C, dtype=residual_dtype)
    llama_cuda.residual_rmsnorm_forward(
        device, residual if both else None, out, rstd, on_gpu(inp1, dtype=residual_dtype),
        on_gpu(inp2, dtype=e) if both else None, on_gpu(weight, dtype=e), eps, B, T, C)
    total = inp1.astype(np.float64) + (inp2 if both else 0)
    if both:
        assert_close(EXACT, residual=(residual, total))
        total = to_float32(residual).astype(np.float64)  # the RMSNorm is that of what is stored
    expected = np.empty((B, T, C)), np.empty((B, T))
    train_llama3.rmsnorm_forward(*expected, total, *wide(weight), eps, B, T, C)
    assert_close(SUMS, out=(out, expected[0]), rstd=(rstd, expected[1]))


@of_llama
def test_rmsnorm_backward(device, B, T):
    C = device.config.C
    e = device.precision.dtype
    g = device.precision.grads
    dinp, dout = (random(B, T, C, seed=seed, dtype=e) for seed in (1, 2))
    inp = random(B, T, C, seed=3, dtype=device.precision.residual)
    weight = random(C, seed=4, dtype=e)
    rstd = (1 / np.sqrt(np.square(inp, dtype=np.float64).mean(axis=-1) + 1e-5)).astype(np.float32)
    expected = dinp.astype(np.float64)
    dweight = np.empty(C)
    train_llama3.rmsnorm_backward(expected, dweight, *wide(dout, inp, weight, rstd), B, T, C)
    for add_residual, rows in ((1, 264), (0, 3), (1, 3)):
        rows = min(rows, B * T)
        got = on_gpu(dinp, dtype=e) if add_residual else unwritten(B, T, C, dtype=e)
        partials = unwritten(rows, C)
        sums = unwritten(C, dtype=g)
        llama_cuda.rmsnorm_backward(
            device, got, partials, on_gpu(dout, dtype=e),
            on_gpu(inp, dtype=device.precision.residual),
            on_gpu(weight, dtype=e), on_gpu(rstd), add_residual, B, T, C)
        cuda.column_sums(device, [(partials, (sums,))])
        assert_close(SUMS, dinp=(got, expected - (0 if add_residual else dinp)),
                     dweight=(sums, dweight))


@of_llama
def test_rope(device, B, T):
    config = device.config
    e = device.precision.dtype
    heads = config.NH + config.NKV
    width = config.Q + 2 * config.K
    cos, sin = train_llama3.rope_table(config, T)
    qkv = random(B, T, width, seed=1, dtype=e)
    got = on_gpu(qkv, dtype=e)
    expected = qkv.astype(np.float64)
    llama_cuda.rope_forward(device, got, on_gpu(np.stack((cos, sin), axis=-1)), B, T,
                            heads * config.HS)
    train_llama3.rope_forward(expected, *wide(cos, sin), B, T, heads, config.HS)
    assert_close(EXACT, qkv=(got, expected))
    assert np.array_equal(to_float32(got)[..., heads * config.HS :], qkv[..., heads * config.HS :])


@of_llama
def test_swiglu(device, B, T):
    F = device.config.F
    N = B * T
    e = device.precision.dtype
    inp = random(N, 2 * F, seed=1, spread=3, dtype=e)
    dout = random(N, F, seed=2, dtype=e)
    inp[0, F : F + 4] = -100.0, 100.0, -1e4, 0.0
    out = unwritten(N, F, dtype=e)
    dinp = unwritten(N, 2 * F, dtype=e)
    again = unwritten(N, F, dtype=e)
    llama_cuda.swiglu_forward(device, out, on_gpu(inp, dtype=e), N, F)
    expected = np.empty((N, F))
    dexpected = np.empty((N, 2 * F))
    with np.errstate(over="ignore"):
        train_llama3.swiglu_forward(expected, *wide(inp), N, F)
        train_llama3.swiglu_backward(dexpected, *wide(inp, dout), N, F)
    llama_cuda.swiglu_backward(device, dinp, again, on_gpu(inp, dtype=e), on_gpu(dout, dtype=e), N,
                               F)
    assert_close(SUMS, out=(out, expected), dinp=(dinp, dexpected))
    assert (out == again).all(), "recomputed with the same bits"
