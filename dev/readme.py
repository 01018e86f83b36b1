"""
Put what the README's commands truly print between its markers.

    python dev/readme.py train      # make train, three minutes (on a GPU machine: into the GPU section, seconds)
    python dev/readme.py test       # test_gpt2.py on gpt2_d12.bin, two minutes

and, on a machine with a GPU, with gpt2_d12.bin and the tokens of tiny_shakespeare there:

    python dev/readme.py epoch      # train_gpt2_cuda.py, one epoch
    python dev/readme.py losses     # dev/compare_losses.py
    python dev/readme.py losses500  # the same, 500 steps
    python dev/readme.py losses_tf32     # the same, in float32 with TF32 products
    python dev/readme.py losses_float32  # the same, in float32 throughout
    python dev/readme.py profile    # train_gpt2_cuda.py -b 64 --profile 10 --matmul cublaslt
    python dev/readme.py attention  # dev/bench_attention.py
    python dev/readme.py library    # dev/kernels/bench.py layernorm_forward
"""

import argparse
import os
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

from train_gpt2 import UserError, open_input, replacing, run_main

README = os.path.join(ROOT, "README.md")


def read_text(path, mend="expected a text file of this project"):
    """A text file as it is; raises UserError when it cannot be read or is no text."""
    with open_input(path, mend) as f:
        try:
            return f.read().decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: no text in UTF-8, found other bytes at {error.start}; {mend}") from None


def split_at_markers(name, path=README):
    """The text up to and with `<!-- NAME begin -->`, and the text from `<!-- NAME end -->` on."""
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    before, _, rest = read_text(path).partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError(f"{path}: the markers {begin} and {end} are not in it")
    return before + begin, end + after


def put_between_markers(name, text, path=README):
    """Replace what stands between the two markers."""
    before, after = split_at_markers(name, path)
    with replacing(path) as f:
        f.write(f"{before}\n{text}\n{after}".encode())


def output_of(command):
    """What a command prints; raises UserError when it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed:\n{done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


def shorten(text, keep=2):
    """Of every run of step lines, the first and last few."""
    lines, steps = [], []
    for line in [*text.rstrip().split("\n"), None]:
        if line is not None and line.startswith(("step ", "iteration ")):
            steps.append(line)
            continue
        lines += steps if len(steps) <= 2 * keep else [*steps[:keep], "...", *steps[-keep:]]
        steps = []
        if line is not None:
            lines.append(line)
    return "\n".join(lines)


def sections():
    """name -> (marker, command)."""
    python = sys.executable
    return {
        "train": ("make_train", ["make", "-s", "train", f"PYTHON={python}"]),
        "test": ("test_gpt2", [python, "test_gpt2.py", "--model", "gpt2_d12.bin", "--state", "gpt2_d12_debug_state.bin"]),
        "epoch": ("epoch_gpu", [python, "train_gpt2_cuda.py", "-e", "gpt2_d12.bin"]),
        "losses": ("losses_gpu", [python, "dev/compare_losses.py", "-e", "gpt2_d12.bin"]),
        "losses_tf32": ("losses_tf32_gpu", [python, "dev/compare_losses.py", "-e", "gpt2_d12.bin", "--dtype", "float32"]),
        "losses_float32": ("losses_float32_gpu", [python, "dev/compare_losses.py", "-e", "gpt2_d12.bin", "--dtype", "float32",
                                                  "--tf32", "0"]),
        "losses500": ("losses500_gpu", [python, "dev/compare_losses.py", "-e", "gpt2_d12.bin", "-b", "32", "-t", "256", "-x", "500"]),
        "profile": ("profile_gpu", [python, "train_gpt2_cuda.py", "-e", "gpt2_d12.bin", "-b", "64", "--profile", "10",
                                    "--matmul", "cublaslt"]),
        "attention": ("attention_gpu", [python, "dev/bench_attention.py"]),
        "library": ("library_gpu", [python, "dev/kernels/bench.py", "layernorm_forward"]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("section", choices=tuple(sections()))
    marker, command = sections()[parser.parse_args().section]
    split_at_markers(marker)  # fail now, not after all the work
    output = shorten(output_of(command))
    if marker == "make_train" and "\n| device " in output:
        marker = "make_train_gpu"
    put_between_markers(marker, f"```\n{output}\n```")
    print(output)


if __name__ == "__main__":
    run_main(main)
