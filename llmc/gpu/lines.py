"""What a run on a GPU prints beyond llmc/progress.py: the MFU's peak, and the lines of llm.c's CUDA program."""

import re

from llmc.gpu.precision import describe_precision
from llmc.progress import LlmcLines, print_table


def flops_per_token(parameters, config, T):
    """Floating-point operations per token of training, as llm.c counts them: 6 N, a multiplication and an addition for
    each of N parameters in three matmuls (output, gradients of input and weight); 6 L NH HS T, the two matmuls of
    causal attention, over T / 2 positions on average. Kaplan et al. 2020, https://arxiv.org/abs/2001.08361"""
    return 6 * parameters + 6 * config.L * config.NH * config.HS * T


PEAKS = {  # CUDA's name -> dense TFLOP/s with float32 accumulation, (bf16, TF32): NVIDIA's data sheets, whitepapers
    r"B200": (2250, 1125), r"H[12]00 NVL": (835.5, 417.5), r"G?H200.*|H100 .*HBM3": (989.4, 494.7),
    r"H100 PCIe": (756, 378), r"A100.*": (312, 156), r"A30": (165, 82), r"A40": (149.7, 74.8), r"A10": (125, 62.5),
    r"A10G": (70, 35), r"L4": (121, 60.5), r"L40S": (362, 183), r"RTX A6000": (154.8, 77.4),
    r"RTX 3090": (71, 35.6), r"RTX 4090": (165.2, 82.6), r"RTX 5090": (209.5, 104.8),
}


def peak_flops(name, kind):
    """Peak FLOP/s of a GPU for matmuls of kind bf16 or tf32; None if it is not known (for a MIG slice, say)."""
    name = re.sub(r"^(NVIDIA )?(GeForce )?", "", name)
    found = [peaks for pattern, peaks in PEAKS.items() if re.fullmatch(pattern, name) and " MIG " not in name]
    return dict(zip(("bf16", "tf32"), found[0])).get(kind, 0) * 1e12 or None if found else None


def peak_rate(gpu, ranks, settings, config, parameters):
    """Tokens/s at which training would use all FLOP/s of `ranks` GPUs; None if their peak is not known."""
    peak = peak_flops(gpu.name, settings.precision.matmul)
    return peak and ranks * peak / flops_per_token(parameters, config, settings.T)


class LlmcCudaLines(LlmcLines):
    """The lines of llm.c's CUDA program of April 2024, to the byte, with --lines llmc."""

    counts_from = 1

    def header(self, device, peak):
        settings, config, loop, val = self.settings, self.loop.config, self.loop, self.loop.val_loader
        if settings.verbose:
            print_table([list(vars(settings).items())])
        run = [("training data", settings.data), ("output", settings.output or "none"), ("batch size B", settings.B),
               ("sequence length T", settings.T), ("tokens in an update", settings.update_tokens),
               ("learning rate", f"{settings.learning_rate:e}"), ("updates", settings.steps),
               ("validate every", settings.val_every),
               ("validation batches", min(settings.val_batches, val.whole_batches) if val else 0),
               ("sample every", settings.sample_every), ("tokens in a sample", settings.sample_tokens)]
        model = [("model", loop.model_path), ("max_seq_len", config.maxT), ("vocab_size", config.V),
                 ("padded_vocab_size", config.Vp), ("num_layers", config.L), ("num_heads", config.NH),
                 ("channels", config.C), ("num_parameters", loop.parameters)]
        precision = describe_precision(settings)
        device = [("device", device.removesuffix(f", {precision}")), ("precision", precision)]
        data = [("train batches", loop.train_loader.num_batches), ("val batches", val.num_batches if val else 0)]
        print_table([run, device, model, data])

    def memory(self, plan):
        for size, what in plan:
            print(f"allocated {-(-size // (1 << 20))} MiB for {what}")

    def training_line(self, step, update, learning_rate, left):
        took = f"{update.seconds * 1000:f} ms, {self.settings.update_tokens / update.seconds:.0f} tok/s"
        return f"step {step + 1:4d}/{self.settings.steps}: train loss {update.loss:f} ({took})"

    def print_end(self, steps):
        print(f"total average iteration time: {1000 * self.seconds / steps:f} ms")
