"""Benchmarks of single operations on a GPU: attention and matmuls. Commands of dev/bench.py."""

import contextlib
import functools
import itertools
import os
import sys

from root import ROOT
import numpy as np

import profile_gpu
import train_gpt2_cuda as cuda
from llmc.checkpoint import padded
from llmc.gpu.device import cp, open_gpu
from llmc.gpu.fp8 import Fp8, operand_table
from llmc.gpu.matmul import Linear, Matmul
from llmc.gpu.memory import Block
from llmc.gpu.precision import Precision
from llmc.tensors import Row, allocate, bf16_bits
from train_gpt2 import SIZES, Config, parameter_table

V, T = 50257, 1024

# --------------------------------------------------------------------------------------------------
# attention


def bench_attention(args):
    """Attention by itself, causal, in bfloat16: our kernels beside PyTorch's FlashAttention-2 and
    cuDNN.

    It is the kernel library that checks and times (dev/kernels/README.md). TFLOP/s count the
    matmuls of the unmasked half once each, two forward and five backward, even if an implementation
    recomputes some. mma_sync is for every GPU, wgmma for Hopper. Ours reads the packed (B,T,3C) and
    writes the packed gradient; PyTorch gets views of it."""
    sys.path.append(os.path.join(ROOT, "dev", "kernels"))
    import checks
    import lab
    import torch
    from attention_layers import AttentionBackward, AttentionForward
    from torch.nn.attention import SDPBackend

    directions = (AttentionForward, AttentionBackward)
    names = ("mma_sync", "wgmma")
    bench = lab.Lab(open_gpu(), Config(max(args.t), 257, 1, args.heads, args.C, 384),
                    Precision("bfloat16"))
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN"
          f" {torch.backends.cudnn.version()}, bfloat16, {args.heads} heads of"
          f" {args.C // args.heads}")
    print(f"{'':<16} {'B':>3} {'T':>5} {'forward ms':>11} {'TFLOP/s':>8} {'backward ms':>12}"
          f" {'TFLOP/s':>8}")
    with bench.streams():
        if any([checks.check_layer(direction(bench.config, bench.precision, bench.gpu, 3, 97), bench,
                                names)
                for direction in directions]):
            return 1
        for T, B in itertools.product(args.t, args.b):
            times = {}
            for direction in directions:
                at_size = direction(bench.config, bench.precision, bench.gpu, B, T)
                at_size.tensors = functools.cache(at_size.tensors)
                for at_size.library_name, at_size.backend, rungs in (
                        ("PyTorch flash", [SDPBackend.FLASH_ATTENTION], ("none",)),
                        ("PyTorch cuDNN", [SDPBackend.CUDNN_ATTENTION], names)):
                    for program, ms in checks.time_layer(at_size, bench, rungs)[0].items():
                        best = min(ms.values())
                        times.setdefault(program, []).append((best, at_size.flops() / best / 1e9))
                    cp.get_default_memory_pool().free_all_blocks()
            for program, ((forward, rate), (backward, its_rate)) in times.items():
                print(f"{program:<16} {B:>3} {T:>5} {forward:>11.4f} {rate:>8.0f}"
                      f" {backward:>12.4f} {its_rate:>8.0f}")
    return 0


# --------------------------------------------------------------------------------------------------
# matmuls


def bench_matmul(args):
    """The matmuls of a training step, each by itself: our kernels beside cuBLASLt's first proposal.

    A row is a matmul, without biases and GELU. Ours are named by their tiles and, in a weight
    gradient, by the number of parts of the inner dimension; the one that training takes is in bold.
    Operands are random, because zeros would be too fast. All take turns, so that a warmer GPU slows
    all alike: medians over CUDA events, without launch overhead. With --dtype fp8, cuBLASLt is
    PyTorch's _scaled_mm, which wants both operands of dweight transposed."""
    gpu = open_gpu()
    config = Config(1024, V, *SIZES[args.model], padded(V))
    precision = cuda.resolve_auto(cuda.CudaSettings(dtype=args.dtype), gpu.arch).precision
    device, matmul = profile_gpu.open_device(cuda.GPT2, gpu, config, precision, "auto")
    print(f"{args.model}, T={T}, {'FP8' if precision.fp8 else precision.dtype};"
          f" {profile_gpu.describe(matmul)}\n")
    print("| matmul | rows x columns x inner dimension | ours, us | cuBLASLt, us"
          " |\n|---|---|---|---|")
    C = config.C
    weights = ("qkv", C, 3 * C), ("attproj", C, C), ("fc", C, 4 * C), ("fcproj", 4 * C,
                                                                       C), ("logits", C, config.Vp)
    with device.stream:
        matmul.allocate()
        fp8 = None
        if precision.fp8:
            params = allocate(parameter_table(config, precision.dtype), cp)
            block = Block({"operands": operand_table(params.table, 16, recomputed=())},
                          scratch=True)
            fp8 = Fp8(matmul, params, block.over(block.allocate()))
        for B, (name, *sizes), kind in itertools.product(args.b, weights,
                                                         ("forward", "dinp", "dweight")):
            if fp8 and name == "attproj":
                continue
            ways, out, inner, rule = (fp8_ways(fp8, name, kind, B * T, *sizes) if fp8
                                      else matmul_ways(
                matmul, kind, B * T, *sizes))
            launched = {way: launches_of(device, call)
                        for way, call in {**ways, "rule": rule}.items()}
            times = [[profile_gpu.measure(device, call, 1) for call in ways.values()]
                     for _ in range(11)]
            for way, seconds in zip(ways, np.median(times, axis=0)):
                mark = "**" if launched[way] == launched["rule"] else ""
                launched[way] = f"{mark}{1e6 * seconds:.1f}{mark}"
            ours = ", ".join(f"{way} {launched[way]}" for way in ways if way != "cuBLASLt")
            shape = " x ".join(map(str, (*out.shape, inner)))
            print(f"| {name} {kind} | {shape} | {ours} | {launched['cuBLASLt']} |", flush=True)
            del ways, out, rule
            cp.get_default_memory_pool().free_all_blocks()


def matmul_ways(matmul, kind, N, C, OC):
    """Return ({way: call}, the result that all of them write, the inner dimension, the call of
    training)."""
    device = matmul.device
    g = matmul.device.geometry
    rng = np.random.default_rng(0)

    def random(*shape):
        numbers = rng.standard_normal(1 << 20, np.float32)  # repeated
        return cp.asarray(np.resize(bf16_bits(numbers) if matmul.precision.bf16 else numbers,
                                    shape))

    inp = random(N, C)
    weight = random(OC, C)
    dout = random(N, OC)
    grads = Row((), matmul.precision.grads).stored_as
    out = cp.empty({"forward": (N, OC), "dinp": (N, C), "dweight": (OC, C)}[kind],
                   grads if kind == "dweight" else inp.dtype)
    ours = Matmul(device, matmul.precision, "kernels")
    options = []
    ours.workspace = matmul.workspace
    inner, library, call = {
        "forward": (C, (inp, weight.T),
                    lambda linear, **option: linear.forward(out, inp, **option)),
        "dinp": (OC, (dout, weight), lambda linear: linear.backward_inp(out, dout)),
        "dweight": (N, (dout.T, inp),
                    lambda linear, **option: linear.backward_weight(dout, inp, **option))}[kind]
    if matmul.kernels:
        few = -(-OC // g.MATMUL_BM) * -(-C // g.MATMUL_BN) <= 2 * device.sm_count
        options = {"forward": [{"columns": width} for width in (g.MATMUL_BN, g.MATMUL_NARROW_BN)],
                   "dinp": [{}],
                   "dweight": [{"splits": splits} for splits in (1, 2, 3, 4, 5, 7, 9, 11)
                               if splits == 1 or few and N >= 256 * splits]}[kind]
    ways = {" ".join(f"{value} {name}" for name, value in option.items())
            or "ours": functools.partial(
        call, Linear(ours, weight, None, out), **option) for option in options}
    ways["cuBLASLt"] = functools.partial(matmul.cublaslt.multiply, out, *library)
    return ways, out, inner, functools.partial(call, Linear(matmul, weight, None, out))


def fp8_ways(fp8, name, kind, N, C, OC):
    """The same in 8 bits, of random operands with scales of 1."""
    import torch

    stream = torch.cuda.ExternalStream(fp8.device.stream.ptr)
    scale = fp8.state.scales
    one = torch.ones((), device="cuda")

    def random(rows, columns, dtype=torch.float8_e4m3fn):
        """The same numbers for PyTorch and for us."""
        with torch.cuda.stream(stream):
            numbers = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).to(dtype)
            return numbers, cp.asarray(numbers.view(torch.uint8))

    rows, columns, inner = {"forward": (N, OC, C), "dinp": (N, C, OC), "dweight": (OC, C, N)}[kind]
    of_a = torch.float8_e4m3fn if kind == "forward" else torch.float8_e5m2  # a gradient
    a, ours_a = random(rows, inner, of_a)
    b, ours_b = random(columns, inner)
    out = cp.empty((rows, columns), Row((), fp8.matmul.precision.grads).stored_as)
    across = kind == "dweight" and name == "fcproj"  # reads dout transposed, inp (N,C) as it is
    if across:
        ours_a, ours_b = random(N, C)[1], ours_a
    elif kind == "dweight":
        ours_a = random(N, OC, of_a)[1]
    operands = ours_a, scale, ours_b, scale
    if kind == "dweight":
        kernel = "weight_across" if across else "weight"
        call = functools.partial(fp8.multiply_long, kernel, out, *operands, 1.0)
    elif kind == "dinp" and name == "logits":
        call = functools.partial(fp8.multiply_long, "classifier_inp", out, *operands, 1.0)
    else:
        kernel = "matmul_fp8" if kind == "forward" else "matmul_fp8_inp"
        call = functools.partial(fp8.multiply, out, *operands, kernel=kernel)

    def cublaslt():
        with torch.cuda.stream(stream):
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    return {"ours": call, "cuBLASLt": cublaslt}, out, inner, call


def launches_of(device, call):
    """[(kernel, last argument)]; for a weight gradient, that is the number of parts."""
    found = []

    def observer(name, arguments):
        found.append((name, arguments[-1] if "weight" in name else None))
        return contextlib.nullcontext()

    device.observer = observer
    call()
    device.observer = None
    return found
