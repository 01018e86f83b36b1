"""Today's core under the names of the coming one, for the programs of dev/. Goes when the core is merged, with the two
`import until_merge` lines of profile_gpu.py and timeline.py."""

import sys
from types import SimpleNamespace

import llmc.gpu.trainer as trainer
import train_gpt2_cuda as cuda
from llmc.gpu.compiler import Cache
from llmc.gpu.matmul import CublasLt, Matmul, MatmulKernels
from llmc.gpu.ranks import ALONE

if not hasattr(trainer, "open_trainer"):
    def open_device(architecture, gpu, config, precision, matmul="auto", text=False):
        device, made = cuda.open_device(gpu, config, precision, Cache(), matmul, text)
        made.cublaslt = made.cublaslt or CublasLt(made)
        return device, made

    trainer.open_device = open_device
    trainer.open_trainer = lambda architecture, gpu, config, params, settings, ranks=ALONE: cuda.open_trainer(
        gpu, config, params, settings, ranks)
    cuda.resolve_auto = cuda.settle
    sys.modules["llmc.gpu.decoder"] = SimpleNamespace(
        open_decoder=lambda architecture, *arguments: cuda.open_decoder(*arguments))

    def backward_weight(self, dweight, dout, inp, scale, narrow=False, splits=1):
        self.backward_weight_ways(dweight, dout, inp, scale)[f"kernels {splits}{' narrow' * narrow}"]()

    MatmulKernels.backward_weight = backward_weight
    Matmul.backward_inp = lambda self, dinp, dout, weight: cuda.matmul_backward_inp(
        self, dinp, dout, weight, *dinp.shape, weight.shape[0])
    Matmul.backward_weight = lambda self, dweight, dout, inp: cuda.matmul_backward_weight(
        self, dweight, dout, inp, None, *inp.shape, dweight.shape[0])
    Matmul.forward = lambda self, out, inp, weight, bias, gelu=None: cuda.matmul_forward(
        self, out, inp, weight, bias, *inp.shape, weight.shape[0])
