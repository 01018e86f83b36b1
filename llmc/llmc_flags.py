"""The flags of llm.c's train_gpt2cu and train_gpt2.py that are written otherwise here, so that its run scripts work.
doc/formats.md has a table of all."""

import os
import re
import sys

from llmc.errors import UserError

RENAMED = {
    "-h": "--hellaswag", "-r": "--recompute", "-f": "--tf32", "-w": "--master_weights", "--input_bin": "-i",
    "--input_val_bin": "-j", "--output_dir": "-o", "--val_loss_every": "-v", "--val_max_steps": "-m",
    "--num_iterations": "-x", "--warmup_iters": "-u", "--learning_rate_decay_frac": "-q",
}  # fmt: skip
WHOLE = {"-x": 0, "-d": 0, "-m": 2**31 - 1}  # what -1 means: one epoch; a batch on each GPU; all validation data
NOTHING_TO_SET = {
    "-ge": "GELU is always fused", "-lg": "nvidia-smi shows a GPU's state", "--dtype": "a CPU run is in float32",
    "-r": "on a CPU, nothing is recomputed", "-f": "a CPU has no TF32", "-w": "on a CPU, weights are float32",
    "--write_tensors": "export_weights.py writes them",
    **dict.fromkeys(("-z", "--zero_stage"), "the optimizer's state is always shared among the GPUs"),
    **dict.fromkeys(("--compile", "--tensorcores", "--flash"), "it is PyTorch's"),
    **dict.fromkeys(("-pn", "-pr", "-pg", "-pm", "-ps", "-pf"), "torchrun, mpirun or srun says which process this is"),
}  # fmt: skip


def from_llmc(argv, known):
    """Return a command line with llm.c's flags as ours, and print a note on each that has no counterpart here. known:
    the page's own flags. (-h without a number asks for help, as everywhere.)"""
    words, rest = [], list(argv)
    while rest:
        flag, value = rest.pop(0), rest[0] if rest else ""
        if RENAMED.get(flag) in known and (flag != "-h" or value.isdigit()):
            flag = RENAMED[flag]
        if flag == "-e" and (size := re.fullmatch(r"gpt([23]):(.*)", value)):
            if size[1] == "3":
                raise UserError(f"-e {value}: expected d6, d12 or d24, for c384, c768 or c1024, and -t 2048")
            value = size[2]
        if flag in NOTHING_TO_SET and flag not in known:
            if value != "0" and os.environ.get("RANK", "0") == "0":
                print(f"note: {flag} {value}: {NOTHING_TO_SET[flag]}", file=sys.stderr)
            del rest[:1]
            continue
        words.append(flag)
        if rest and flag in known and known[flag].nargs is None:  # it takes a value, perhaps one like -1
            words.append(str(WHOLE[flag]) if value == "-1" and flag in WHOLE else value)
            del rest[0]
    return words
