"""
Attention by itself: our kernels beside PyTorch's FlashAttention-2 and cuDNN, forward and backward; needs a GPU.

    python dev/bench_attention.py                    # bfloat16, 12 heads of 64: GPT-2 124M's layer
    python dev/bench_attention.py --heads 6 -C 768   # heads of 128

Attention is causal. Times are medians over CUDA events, with the L2 cache flushed before each call. TFLOP/s count the
matmuls of the unmasked half once each, two forward and five backward, even if an implementation recomputes some. "ours,
sm_80" are the portable kernels. A flush writes 1 GiB, which takes longer than Python needs to launch what is timed, so
small shapes do not measure Python's overhead, which the trainer's CUDA graph does not have either. Ours reads the
packed (B,T,3C) and writes the packed gradient; PyTorch gets q, k, v as (B,NH,T,HS) views of that tensor. Each result is
first compared with PyTorch's plain float32 attention; if one is wrong, the exit status is 1.
"""

import argparse
import os
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import llmc  # noqa: F401  (before NumPy: it tells OpenBLAS how to run)

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import train_gpt2_cuda as cuda
from llmc.gpu.compiler import Cache
from llmc.gpu.device import cp, gpu_errors_as_lines, open_gpu
from llmc.errors import UserError, run_main
from llmc.gpu.geometry import check_sizes
from llmc.gpu.precision import Precision
from train_gpt2 import Config
from profile_gpu import attention_flops

BATCHES, LENGTHS = (1, 4, 16, 64), (256, 1024, 4096)


class Ours:
    def __init__(self, device, config, qkv, dout):
        B, T, C = dout.shape
        self.device, self.sizes = device, (B, T, C, config.NH)
        self.out, self.dqkv = torch.empty_like(dout), torch.empty_like(qkv)
        lse, D = (torch.empty((B, config.NH, T), device="cuda") for _ in range(2))
        rows = cuda.partial_rows(B, T, device.sm_count, device.geometry).attention
        sums = torch.empty((rows, 3 * C), device="cuda")
        out, dqkv, lse, D, sums, dout, qkv = map(view, (self.out, self.dqkv, lse, D, sums, dout, qkv))
        self.for_forward, self.for_backward = (out, lse, qkv), (dqkv, D, sums, dout, qkv, out, lse)

    def forward(self):
        cuda.attention_forward(self.device, *self.for_forward, *self.sizes)

    def backward(self):
        cuda.attention_backward(self.device, *self.for_backward, *self.sizes)

    def results(self):
        return self.out, self.dqkv


class PyTorch:
    def __init__(self, backend, config, qkv, dout):
        B, T, C = dout.shape
        self.backend = backend
        heads = (x.view(B, T, config.NH, C // config.NH).transpose(1, 2) for x in qkv.detach().split(C, dim=2))
        self.q, self.k, self.v = (x.requires_grad_() for x in heads)
        self.dout = dout.view(B, T, config.NH, C // config.NH).transpose(1, 2)
        self.out = None

    def forward(self):
        with sdpa_kernel([self.backend]):
            self.out = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)

    def backward(self):
        self.grads = torch.autograd.grad(self.out, (self.q, self.k, self.v), self.dout, retain_graph=True)

    def results(self):
        B, NH, T, HS = self.q.shape
        out, *grads = (x.transpose(1, 2).reshape(B, T, NH * HS) for x in (self.out, *self.grads))
        return out, torch.cat(grads, dim=2)


def view(tensor):
    """View a PyTorch tensor as a CuPy array; bfloat16 as its bits, uint16."""
    return cp.from_dlpack(tensor.detach().view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor.detach())


def milliseconds(call, flush, repeats):
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in times[3:])[repeats // 2]


def reference(config, qkv, dout):
    """Return out (2,T,C) and dqkv (2,T,3C) in float32, for the first and the last sequence of the batch."""
    model = PyTorch(SDPBackend.MATH, config, qkv[[0, -1]].float(), dout[[0, -1]].float())
    model.forward()
    model.backward()
    return [result.detach() for result in model.results()]


def agrees(name, results, expected):
    okay = True
    for what, got, want in zip(("out", "dqkv"), results, expected):
        error = float((got.detach()[[0, -1]].float() - want).abs().max() / want.abs().max())
        if not error <= 2e-2:
            print(f"{name}: {what} has an error of {error:.1e} of its largest value: FAIL")
            okay = False
    return okay


@gpu_errors_as_lines()
def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--heads", type=int, default=12, help="NH")
    parser.add_argument("-C", type=int, default=768, help="channels")
    parser.add_argument("-b", type=int, nargs="*", default=BATCHES, help="batch sizes")
    parser.add_argument("-t", type=int, nargs="*", default=LENGTHS, help="lengths")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU, and this comparison needs one")
    config = Config(max(args.t), 257, 1, args.heads, args.C, 384)
    check_sizes(config)
    gpus = {"ours": open_gpu(), "ours, sm_80": open_gpu("sm_80")}
    devices = {name: cuda.open_device(gpu, config, Precision("bfloat16"), Cache())[0] for name,
               gpu in gpus.items()}
    backends = {"PyTorch flash": SDPBackend.FLASH_ATTENTION, "PyTorch cuDNN": SDPBackend.CUDNN_ATTENTION}
    flush, okay = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), True
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()},"
          f" bfloat16, {args.heads} heads of {args.C // args.heads}")
    print(f"{'':<16} {'B':>3} {'T':>5} {'forward ms':>11} {'TFLOP/s':>8} {'backward ms':>12} {'TFLOP/s':>8}")
    for T in args.t:
        for B in args.b:
            torch.manual_seed(B + T)
            qkv, dout = (torch.randn((B, T, n * args.C), device="cuda").bfloat16() for n in (3, 1))
            expected = reference(config, qkv, dout)
            for name in (*devices, *backends):
                stream = torch.cuda.current_stream()
                if name in devices:
                    stream = torch.cuda.ExternalStream(devices[name].stream.ptr)
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    model = Ours(devices[name], config, qkv,
                                 dout) if name in devices else PyTorch(backends[name], config, qkv, dout)
                    if name in devices:
                        devices[name].stream.use()
                    model.forward()
                    model.backward()
                    torch.cuda.synchronize()
                    okay &= agrees(f"{name}, B={B} T={T}", model.results(), expected)
                    times = [milliseconds(call, flush, 20) for call in (model.forward, model.backward)]
                rates = [attention_flops(B, T, args.C, matmuls) / ms / 1e9 for matmuls, ms in zip((2, 5), times)]
                print(f"{name:<16} {B:>3} {T:>5} {times[0]:>11.4f} {rates[0]:>8.0f} {times[1]:>12.4f} {rates[1]:>8.0f}")
                del model
    return 0 if okay else 1


if __name__ == "__main__":
    run_main(main)
