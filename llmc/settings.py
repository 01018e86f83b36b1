"""Settings: one dataclass makes the command line, the defaults and the help of both trainers."""

import argparse
import dataclasses
import functools
import math
import os
import re
import sys
import textwrap
from typing import ClassVar

from llmc.errors import Parser, UserError
from llmc.files import HELLASWAG

RENAMED = {  # llm.c's flags that are written otherwise here: doc/formats.md has a table of all
    "-h": "--hellaswag", "-r": "--recompute", "-f": "--tf32", "-w": "--master_weights",
    "--input_bin": "-i", "--input_val_bin": "-j", "--output_dir": "-o", "--val_loss_every": "-v",
    "--val_max_steps": "-m", "--num_iterations": "-x", "--warmup_iters": "-u",
    "--learning_rate_decay_frac": "-q"}
GPT3 = {"gpt3:c384": "d6", "gpt3:c768": "d12", "gpt3:c1024": "d24"}  # GPT-2's of the same sizes
DEPTHS = {"c1536": 24, "c2048": 24, "c2560": 32, "c4096": 32}  # of models named by their channels
# what -1 means: one epoch; a batch on each GPU; all validation data
WHOLE = {"-x": 0, "-d": 0, "-m": 2**31 - 1}
NOTHING_TO_SET = {
    "-ge": "GELU is always fused",
    "-lg": "nvidia-smi shows a GPU's state",
    "--dtype": "a CPU run is in float32",
    "-r": "on a CPU, nothing is recomputed",
    "-f": "a CPU has no TF32",
    "-w": "on a CPU, weights are float32",
    "--write_tensors": "export_weights.py writes them; its --write_tensors 0 times PyTorch's steps",
    "--inference_only": "it is PyTorch's",
    "--device": "train_gpt2.py is for CPUs, train_gpt2_cuda.py for GPUs, export_weights.py both",
    **dict.fromkeys(("-z", "--zero_stage"),
                    "the optimizer's state is always shared among the GPUs"),
    **dict.fromkeys(("--compile", "--tensorcores", "--flash"), "it is PyTorch's"),
    **dict.fromkeys(("-pn", "-pr", "-pg", "-pi", "-ps", "-pf"),
                    "torchrun, mpirun or srun says which process this is")}


def option(default, *flags, group, help, **argparse_options):
    """A dataclass field that is also a command-line flag; `argparse_options` go to add_argument
    (choices, metavar)."""
    metadata = {"flags": flags, "group": group, "help": help, **argparse_options}
    return dataclasses.field(default=default, metadata=metadata)


def with_default(settings_class, name, default, help=None):
    """A field of a settings class, with another default and perhaps another help text."""
    metadata = settings_class.__dataclass_fields__[name].metadata
    metadata = {**metadata, "help": help or metadata["help"]}
    return dataclasses.field(default=default, metadata=metadata)


GROUPS = "files", "batch", "optimizer", "reports", "checkpoints"
files, batch, optimizer, reports, checkpoints = (functools.partial(option, group=group)
                                                 for group in GROUPS)


@dataclasses.dataclass
class Settings:
    """The settings of a training run. The defaults are those of llm.c's CPU program of April 2024,
    for fine-tuning; for a model with random weights (-e dN), see from_scratch."""

    model: str = files("gpt2_124M.bin", "-e", help="model to start from: a .bin file, or the"
                       " directory of a run; or d2, d4, d6, d12 (GPT-2 124M), d24, d36, d48, or"
                       " GPT-3's c1536, c2048, c2560, c4096: random weights, for sequences of at"
                       " most T tokens")
    data: str = files("data/tiny_shakespeare", "-i", help="token files: a prefix to _train.bin and"
                      " _val.bin, or the path or quoted glob of training shards")
    val_data: str = files("", "-j", help="validation tokens, path or quoted glob (default: -i, val"
                          " for train)")
    tokenizer: str = files("", help="tokenizer file, to print samples with (default:"
                           " PREFIX_tokenizer.bin beside the data, or gpt2_tokenizer.bin)")
    output: str = files("", "-o", help="log file when it ends in .log, else a directory for"
                        " main.log, checkpoints and the last model (default: nothing is saved)")

    B: int = batch(4, "-b", "--batch_size", help="sequences in a batch, B")
    T: int = batch(64, "-t", "--sequence_length", help="tokens in a sequence, T")
    total_batch_size: int = batch(0, "-d", help="tokens in an update, a multiple of B*T:"
                                  " accumulates the gradients of several batches (0: B*T, on each"
                                  " GPU)")
    shuffle: int = batch(-1, choices=(-1, 0, 1), help="1: shards, and the batches of each, in"
                         " llm.c's random order; 0: in order; -1: 1 if there are several shards (-y"
                         " 1 keeps the first run's)")
    spread: int = batch(0, choices=(0, 1), help="1: each row of a training batch reads from its own"
                        " part of a shard, because consecutive rows are too alike in a small batch")
    seed: int = batch(42, help="seed of random weights and of --shuffle 1's order (-y 1 keeps the"
                      " first run's)")
    steps: int = batch(41, "-x", help="number of updates (0: one epoch; of random weights: at most"
                       " ten, unless given)")
    overfit_single_batch: int = batch(0, "-a", choices=(0, 1), help="1: train on the first batch"
                                      " again and again, which a model that learns soon knows by"
                                      " heart")

    learning_rate: float = optimizer(1e-4, "-l", help="peak learning rate (of random weights, N"
                                     " layers: 0.0072 / N, less in fewer than 200 steps)")
    warmup_steps: int = optimizer(0, "-u", help="steps of linear warm-up (of random weights: 100,"
                                  " but at most half of -x)")
    schedule: str = optimizer("constant", "-k",
                              choices=("constant", "cosine", "linear", "wsd", "cooldown"),
                              help="learning rate schedule after the warm-up")
    final_fraction: float = optimizer(0.0, "-q", help="learning rate at the end, as a fraction of"
                                      " the peak")
    beta1: float = optimizer(0.9, help="AdamW: decay of the first moment")
    beta2: float = optimizer(0.999, help="AdamW: decay of the second moment")
    eps: float = optimizer(1e-8, help="AdamW: added to the denominator")
    weight_decay: float = optimizer(0.0, "-c", help="AdamW: decoupled weight decay")
    decay: str = optimizer("matrices", help="what weight decay applies to",
                           choices=("matrices", "all"))
    grad_clip: float = optimizer(0.0, help="largest global gradient norm (0: no clipping)")
    skip_loss_zscore: float = optimizer(0.0, "-sl", help="skip an update whose loss is an outlier:"
                                        " more than X standard deviations above the mean of the"
                                        " last 128 (0: never)")
    skip_norm_zscore: float = optimizer(0.0, "-sg", help="the same for the gradient norm (0:"
                                        " never)")

    val_every: int = reports(10, "-v", help="validate every N steps (0: never)")
    val_batches: int = reports(5, "-m", help="validate on at most N batches")
    patience: int = reports(0, help="stop after N validations in a row that are above the lowest"
                            " (0: never)")
    hellaswag: int = reports(0, help=f"evaluate on HellaSwag, too ({HELLASWAG}; 1: all, N: N"
                             " examples, 0: never)")
    sample_every: int = reports(20, "-s", help="generate text every N steps (0: never)")
    sample_tokens: int = reports(64, "-g", help="tokens in a sample, including the first (end of"
                                 " text); beyond T, the model sees only the last T/2 to T")
    final_reports: int = reports(0, choices=(0, 1), help="1: validate and sample after the last"
                                 " update in any case")
    print_every: int = reports(1, help="print a line every N steps (the log has every step)")
    lines: str = reports("short", choices=("short", "llmc"), help="llmc: llm.c's lines of April"
                         " 2024, to the byte")
    verbose: bool = reports(False, help="first print all settings, and the memory for each part")

    checkpoint_every: int = checkpoints(0, "-n", help="save every N updates, and after the last (0:"
                                        " only then)")
    checkpoints_keep: int = checkpoints(0, "-nk", help="keep only the newest N checkpoints (0: keep"
                                        " all)")
    major_checkpoint_every: int = checkpoints(0, "-nm", help="with -nk: also keep those of every"
                                              " Nth step (0: none)")
    resume: int = checkpoints(0, "-y", choices=(0, 1), help="1: continue from the newest complete"
                              " checkpoint in -o")

    AT_LEAST: ClassVar = dict(
        B=1, T=1, steps=0, total_batch_size=0, warmup_steps=0, val_every=0, val_batches=1,
        patience=0, hellaswag=0, sample_every=0, sample_tokens=1, print_every=1, checkpoint_every=0,
        checkpoints_keep=0, major_checkpoint_every=0, seed=0, weight_decay=0.0, grad_clip=0.0,
        learning_rate=0.0, skip_loss_zscore=0.0, skip_norm_zscore=0.0)
    FROM_SCRATCH: ClassVar = dict(
        B=16, shuffle=1, spread=1, steps=1000, schedule="cosine", beta2=0.95, weight_decay=0.1,
        grad_clip=1.0, val_every=100, val_batches=20, sample_every=200, sample_tokens=200,
        final_reports=1, print_every=10)
    LLMC: ClassVar = dict(
        B=4, T=1024, shuffle=1, steps=0, learning_rate=3e-4, schedule="cosine", final_fraction=1.0,
        beta2=0.95, grad_clip=1.0, val_every=20, val_batches=20, final_reports=1)
    SHORT_RUN: ClassVar = 200  # steps
    gpus: ClassVar = 1
    is_llmc: ClassVar = False  # whether a flag that only llm.c has made LLMC the defaults
    given: ClassVar = None  # with from_scratch's defaults: the fields that the command line sets

    def fit_to_text(self, updates):
        """Fit from_scratch's defaults, once, to a text of so many updates an epoch. -x is at most
        ten epochs, as more would make a model memorize a small text. Warm-up takes at most half of
        the steps, and in fewer than SHORT_RUN the peak learning rate is lower: at a rate that rises
        faster, the loss jumps up by 1 to 4 around step 8, as a new model's activations are small,
        and layernorm magnifies each change of them."""
        if self.given is None:
            return
        if "steps" not in self.given:
            self.steps = min(self.steps, 10 * max(1, updates))
        steps = self.steps or updates
        if "warmup_steps" not in self.given:
            self.warmup_steps = min(self.warmup_steps, steps // 2)
        if "learning_rate" not in self.given and steps < self.SHORT_RUN:
            share = max(0.25, steps / self.SHORT_RUN)
            self.learning_rate = float(f"{share * self.learning_rate:.4g}")  # as one would write it

    @classmethod
    def from_scratch(cls, depth):
        """The defaults of a model dN with random weights, N = depth; in short runs see fit_to_text.
        The peak learning rate, 0.0072 / N, is GPT-3's for d12 (Brown et al. 2020)."""
        return {**cls.FROM_SCRATCH, "learning_rate": 0.0072 / max(1, depth), "warmup_steps": 100}

    @property
    def output_dir(self):
        """The run's directory, or None when -o is absent or names a .log file."""
        return self.output if self.output and not self.output.endswith(".log") else None

    # batches whose gradients are averaged for one update, and tokens in one, on all GPUs together
    micro_steps = property(lambda self: max(self.gpus, self.total_batch_size // (self.B * self.T)))
    update_tokens = property(lambda self: self.B * self.T * self.micro_steps)
    # whether an update may be skipped (see outliers.py); whether each computes the gradient norm
    skips_outliers = property(lambda self: bool(self.skip_loss_zscore or self.skip_norm_zscore))
    needs_norm = property(lambda self: bool(self.grad_clip or self.output_dir
                                            or self.skips_outliers))

    def of_updates(self):
        """{field: value} of what decides how an update follows from its gradients."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)
                if field.metadata["group"] == "optimizer" or field.name == "steps"}

    def check(self):
        """Raise UserError for an impossible value."""
        def expect(name, is_right, expected):
            if not is_right:
                raise UserError(f"{flag_of(self, name)} {getattr(self, name)}: expected {expected}")

        for field in (field for field in dataclasses.fields(self) if "choices" in field.metadata):
            choices = field.metadata["choices"]
            expect(field.name, getattr(self, field.name) in choices, f"one of {choices}")
        for name, least in self.AT_LEAST.items():
            end, words = (math.inf, "finite") if isinstance(least, float) else (2**31, "below 2^31")
            expect(name, least <= getattr(self, name) < end,
                   f"a number of at least {least}, and {words}")
        expect("beta1", 0.0 <= self.beta1 < 1.0, "0 <= beta1 < 1")
        expect("beta2", 0.0 <= self.beta2 < 1.0, "0 <= beta2 < 1")
        expect("eps", 1e-30 <= self.eps < 1e30, "1e-30 to 1e30 (the default is 1e-8)")
        expect("final_fraction", 0.0 <= self.final_fraction <= 1.0, "0 to 1")
        expect("data", self.data, "the name of a file, not an empty one")
        batch, gpus = self.B * self.T * self.gpus, "*GPUs" if self.gpus > 1 else ""
        expect("total_batch_size", self.total_batch_size % batch == 0,
               f"a multiple of B*T{gpus} = {batch}")
        for name in ("hellaswag", "patience"):
            expect(name, not getattr(self, name) or self.val_every,
                   "-v STEPS too: it comes with each validation")
        if self.resume and not self.output_dir:
            found = f"-o {self.output} is a log file" if self.output else "there is no -o"
            raise UserError(f"-y needs a directory with checkpoints, but {found}: pass -o DIR")


def flag_of(settings, name):
    """'-b/--batch_size' for the field B: how messages name a setting."""
    return "/".join(field_flags(settings.__dataclass_fields__[name]))


def field_flags(field):
    flags = field.metadata["flags"]
    return flags if any(flag.startswith("--") for flag in flags) else (*flags, f"--{field.name}")


def from_llmc(argv, known):
    """Return (a command line with llm.c's flags as ours, the flags that only llm.c has), and print
    notes on what has no counterpart here. known: the page's own flags. (-h without a number asks
    for help, as everywhere.)"""
    words, theirs = [], []
    notes = {}  # reason -> flags
    rest = list(argv)
    while rest:
        flag = given = rest.pop(0)
        value = rest[0] if rest else ""
        if flag == "--inference_only" and value == "1":
            raise UserError("--inference_only: PyTorch's forward passes are timed by: python"
                            " export_weights.py --write_tensors 0 --inference_only 1")

        is_descriptor = flag == "-e" and value.startswith(("gpt2:", "gpt3:"))
        is_theirs = is_descriptor or (flag, value) == ("-x", "-1")
        if flag in NOTHING_TO_SET and flag not in known:
            is_theirs = not flag.startswith("--") and flag != "-w"
            if value != "0" or flag == "--write_tensors":
                notes.setdefault(NOTHING_TO_SET[flag], []).append(f"{flag} {value}")
            del rest[:1]
        else:
            if RENAMED.get(flag) in known and (flag != "-h" or value.isdigit()):
                is_theirs = flag in ("-h", "-r", "-f")
                flag = RENAMED[flag]
            words.append(flag)
            if rest and flag in known and known[flag].nargs is None:  # it takes a value, even -1
                if is_descriptor:
                    value = GPT3.get(value, value[5:])
                words.append(str(WHOLE[flag]) if value == "-1" and flag in WHOLE else value)
                del rest[0]
        theirs += [given] * is_theirs

    if os.environ.get("RANK", "0") == "0":
        for reason, flags in notes.items():
            print(f"note: {', '.join(flags)}: {reason}", file=sys.stderr)
    return words, theirs


def parse_settings(settings_class, description, argv=None):
    """Parse the command line into a checked settings_class. argparse exits with 2 on a bad flag."""
    parser = Parser(description)
    groups = {}
    for field in dataclasses.fields(settings_class):
        extra = {name: value for name, value in field.metadata.items()
                 if name not in ("flags", "group")}
        if (group := field.metadata["group"]) not in groups:
            groups[group] = parser.add_argument_group(group)
        if field.type is bool:
            extra["action"] = "store_true"
        else:
            extra["type"] = field.type
            words = {int: "N", float: "X", str: "NAME"}
            extra.setdefault("metavar", None if "choices" in extra else words[field.type])
        # the help says what "" means
        default = argparse.SUPPRESS if field.default == "" else field.default
        if field.name in settings_class.FROM_SCRATCH:
            of_random = settings_class.FROM_SCRATCH[field.name]
            extra["help"] += f" (default: %(default)s; of random weights: {of_random})"
        groups[group].add_argument(*field_flags(field), dest=field.name, default=default, **extra)
    fields = dataclasses.fields(settings_class)
    absent = argparse.Namespace(**{field.name: None for field in fields})
    known = parser._option_string_actions
    argv, theirs = from_llmc(sys.argv[1:] if argv is None else argv, known)
    parsed = vars(parser.parse_args(argv, absent))
    given = {name: value for name, value in parsed.items() if value is not None}
    settings = settings_class(**given)
    random = re.fullmatch(r"[a-z](\d+)", settings.model)
    if theirs and settings_class.LLMC:
        settings = settings_class(**{**settings_class.LLMC, **given})
        settings.is_llmc = True
    elif random and not os.path.exists(settings.model):
        depth = DEPTHS.get(settings.model, int(random[1]))
        settings = settings_class(**{**settings_class.from_scratch(depth), **given})
        settings.given = frozenset(given)
    settings.check()
    if os.environ.get("RANK", "0") == "0":
        print_notes(settings, theirs)
    return settings


def print_notes(settings, theirs):
    """Print what a user might not expect. theirs: flags of the command line that only llm.c has."""
    if settings.is_llmc:
        print(f"note: with llm.c's {' '.join(dict.fromkeys(theirs))}, what is not given is as in"
              " llm.c: one epoch, 4 x 1024 tokens and so on (doc/formats.md)", file=sys.stderr)
    if settings.checkpoint_every and not settings.output_dir:
        found = f"-o {settings.output} is a log file" if settings.output else "there is no -o"
        print(f"note: -n {settings.checkpoint_every}: no checkpoints, as {found}: pass -o DIR",
              file=sys.stderr)


def print_changed_settings(settings):
    """Print one line with the settings that differ from their defaults, or nothing if none does."""
    changed = [f"{f.name}={getattr(settings, f.name)}" for f in dataclasses.fields(settings)
               if getattr(settings, f.name) != f.default]
    if changed:
        print(textwrap.fill(f"settings: {' '.join(changed)}", 120, subsequent_indent=" " * 10,
                            break_long_words=False, break_on_hyphens=False))
