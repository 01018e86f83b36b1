"""What a run prints: a header, a line per step with the time left, and on a terminal a progress bar below the lines."""

import os
import re
import shutil
import sys
import time

# ----------------------------------------------------------------------------------------------------------------------
# the header


def print_start(settings, config, parameters, model, train_loader, val_loader, device):
    """Print what a run is, in a few lines; with --verbose, all settings, too. parameters: their number; model, device:
    how to name them."""
    B, T = settings.B, settings.T
    epochs = settings.steps * settings.micro_steps / train_loader.batches_per_epoch
    rows = [
        ("model", f"{model}: L={config.L} NH={config.NH} C={config.C} maxT={config.maxT} V={config.V},"
                  f" {parameters:,} parameters"),
        ("data", f"{settings.data}: {train_loader.batches_per_epoch} batches of {B} x {T} tokens,"
                 f" {min(settings.val_batches, val_loader.whole_batches) if val_loader else 0} to validate"),
        ("run", f"{settings.steps} steps of {settings.update_tokens} tokens: {epochs:.2f} epochs"),
        ("device", device),
        ("output", settings.output or "none; with -o DIR, the model is saved there"),
    ]  # fmt: skip
    if settings.verbose:
        print_table([list(vars(settings).items()), rows])
        return
    for name, value in rows:
        print(f"{name:<9} {value}")


def print_memory(plan, each):
    """Print a plan, [(bytes, what for)]: in one line or, with `each`, a line per entry."""
    if not each:
        size = sum(size for size, _ in plan)
        print(f"memory    {f'{size / 2**30:.1f} GiB' if size >> 30 else f'{size / 2**20:.0f} MiB'}")
        return
    for size, what in plan:
        print(f"allocated {-(-size // (1 << 20))} MiB for {what}")


def print_table(groups):
    """Print groups of (name, value) in a box."""
    groups = [[(name, str(value)) for name, value in rows] for rows in groups]
    names, width = (max(least, *(len(row[i]) for rows in groups for row in rows)) for i, least in enumerate((21, 50)))
    line = f"+-{'-' * names}-+-{'-' * width}-+"
    for rows in groups:
        print(line)
        for name, value in rows:
            print(f"| {name:<{names}} | {value:<{width}} |")
    print(line)


# ----------------------------------------------------------------------------------------------------------------------
# time, and model FLOPs utilization


def step_time(seconds):
    """'0.64 s', '7.09 ms'."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.2f} ms"


def duration(seconds):
    """'45 s', '5 min', '2 h 10 min', '3 d 4 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def flops_per_token(parameters, config, T):
    """Floating-point operations per token of training, as llm.c counts them: 6 N + 6 L C T.

    6 N: a multiplication and an addition for each of N parameters, in three matmuls: the output and the gradients of
    input and weight (wpe, which is only looked up, is 0.6 percent of GPT-2 124M). 6 L C T: the two matmuls of causal
    attention, over T / 2 positions on average. Scaling Laws for Neural Language Models, Kaplan et al. 2020,
    https://arxiv.org/abs/2001.08361
    """
    return 6 * parameters + 6 * config.L * config.C * T


PEAKS = {  # CUDA's name -> dense TFLOP/s with float32 accumulation, (bf16, TF32): NVIDIA's data sheets, whitepapers
    r"B200": (2250, 1125),
    r"H[12]00 NVL": (835.5, 417.5),
    r"G?H200.*|H100 .*HBM3": (989.4, 494.7),
    r"H100 PCIe": (756, 378),
    r"A100.*": (312, 156),
    r"A30": (165, 82),
    r"A40": (149.7, 74.8),
    r"A10": (125, 62.5),
    r"A10G": (70, 35),
    r"L4": (121, 60.5),
    r"L40S": (362, 183),
    r"RTX A6000": (154.8, 77.4),
    r"RTX 3090": (71, 35.6),
    r"RTX 4090": (165.2, 82.6),
    r"RTX 5090": (209.5, 104.8),
}  # fmt: skip


def peak_flops(name, kind):
    """Peak FLOP/s of a GPU for matmuls of kind bf16 or tf32; None if it is not known (for a MIG slice, say)."""
    name = re.sub(r"^(NVIDIA )?(GeForce )?", "", name)
    found = [peaks for pattern, peaks in PEAKS.items() if re.fullmatch(pattern, name) and " MIG " not in name]
    return dict(zip(("bf16", "tf32"), found[0])).get(kind, 0) * 1e12 or None if found else None


# ----------------------------------------------------------------------------------------------------------------------
# while it trains


class Console:
    """Prints a run's lines, which count updates done, on CPU and GPU alike:

        step  20/500 | val loss 4.1234
        step  21/500 | train loss 4.0517 | 0.64 s | 402 tok/s | 5 min left

    On a GPU whose peak is known, train lines also show MFU, the model FLOPs utilization. `--lines llmc` prints llm.c's
    lines instead. On a terminal, if tqdm is installed, its bar stays below the short lines until a signal comes or the
    `with` block ends.
    """

    def __init__(self, settings, first_step, token_flops=None, peak=None):
        """token_flops (per token), peak (FLOP/s): for MFU, which is left out if either is None."""
        self.settings, self.first_step, self.done = settings, first_step, first_step
        self.tokens = settings.update_tokens
        self.flops, self.peak = token_flops and token_flops * self.tokens, peak
        self.short = settings.lines == "short"
        self.seconds, self.skipped = 0.0, 0  # of all steps so far
        self.doing, self.val_loss = "", None
        self.format_meter = None  # tqdm's, if there is a bar
        self.bar, self.drawn = "", 0.0  # what the terminal shows, and since when
        self.writing, self.pending = False, ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.erase()

    def start(self, interruption):
        """Call this before the first step. The interruption's messages will take the bar's place."""
        self.began = self.timed_from = time.perf_counter()
        if not (self.short and sys.stdout.isatty()) or os.environ.get("TQDM_DISABLE", "0") not in ("", "0"):
            return
        try:
            from tqdm import tqdm
        except ImportError:  # training does not need it
            return
        self.format_meter, self.interruption = tqdm.format_meter, interruption
        self.say, interruption.say = interruption.say, self.say_instead

    def wait_for(self, what):
        """Show in the bar what the run is doing now; None hides the bar until the next line."""
        self.doing = what
        if what is None:
            self.erase()
        else:
            self.draw(at_once=True)

    def validation(self, step, loss):
        self.val_loss, self.doing = loss, "training"
        self.print(self.step_of(step) + f" | val loss {loss:.4f}" if self.short else f"val loss {loss:f}")

    def hellaswag(self, step, correct, count):
        accuracy = f"HellaSwag {correct}/{count} = {correct / count:.4f}"
        self.doing = "training"
        self.print(f"{self.step_of(step)} | {accuracy}" if self.short else accuracy)

    def training(self, step, loss, seconds, llmc):
        """Print the line of update number `step`, counted from 0, which took `seconds`. llmc: llm.c's line for it."""
        self.done, self.seconds, self.doing = step + 1, self.seconds + seconds, "training"
        left = self.time_left(seconds)
        if self.done % self.settings.print_every and self.done not in (self.first_step + 1, self.settings.steps):
            self.draw()
            return
        if not self.short:
            print(llmc)
            return
        words = [self.step_of(self.done), f"train loss {loss:.4f}", step_time(seconds),
                 f"{self.tokens / seconds:.0f} tok/s"]
        if self.flops and self.peak:
            words.append(f"{self.flops / seconds / self.peak:.1%} MFU")
        if self.done < self.settings.steps:
            words.append(f"{duration(left)} left")
        self.print(" | ".join(words))

    def skip(self, step, reason):
        """Print that an update was skipped. step: its number in this run's lines."""
        self.skipped += 1
        self.print(f"{self.step_of(step)} | update skipped: {reason}")

    def end(self, llmc=None):
        """Print the last lines of a complete run. llmc: llm.c's line for that."""
        self.erase()
        if self.skipped:
            print(f"updates skipped: {self.skipped}")
        steps = self.done - self.first_step
        if steps and self.short:
            rate = f"{self.tokens * steps / self.seconds:.0f} tok/s"
            where = f"; the model is in {self.settings.output_dir}" if self.settings.output_dir else ""
            print(f"{steps} steps in {duration(time.perf_counter() - self.began)}, {rate} while training{where}")
        elif steps and llmc:
            print(llmc)

    def step_of(self, done):
        total = str(self.settings.steps)
        return f"step {done:>{len(total)}}/{total}"

    def time_left(self, seconds):
        """Seconds left at the pace so far. Validation and the like count; the first step, a warm-up, does not."""
        now, before = time.perf_counter(), self.done - self.first_step - 1  # steps since the first one
        if before == 0:
            self.timed_from = now
        pace = (now - self.timed_from) / before if before else seconds
        return pace * (self.settings.steps - self.done)

    # -- the bar: one line at the bottom, overwritten by the next line that is printed

    def has_bar(self):
        return self.format_meter and self.interruption.signal is None

    def print(self, line):
        if not self.format_meter:
            print(line)
            return
        self.write(f"\r{line:<{len(self.bar)}}\n")
        self.draw()

    def draw(self, at_once=False):
        """Show the bar if it is hidden; else redraw it, at most ten times a second unless at_once."""
        now = time.perf_counter()
        if not self.has_bar() or self.bar and not at_once and now < self.drawn + 0.1:
            return
        columns = shutil.get_terminal_size().columns - 3  # room for the echo of Ctrl-C
        postfix = f"val loss {self.val_loss:.4f}" if self.val_loss is not None else None
        encoding = (sys.stdout.encoding or "").lower()
        bar = self.format_meter(self.done, self.settings.steps, now - self.began, columns, self.doing,
                                not encoding.startswith("utf"), initial=self.first_step, postfix=postfix,
                                bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}")
        self.drawn = now
        self.write("\r" + bar.ljust(len(self.bar)), bar)
        if not self.has_bar():  # a signal came meanwhile
            self.erase()

    def erase(self):
        if self.bar:
            self.write(blank(self.bar))

    def write(self, text, bar=""):
        """Write a text that leaves `bar` as the terminal's last line. A signal's message waits until it is written."""
        self.writing = True
        sys.stdout.write(text)
        sys.stdout.flush()
        self.bar, self.writing = bar, False
        if self.pending:
            self.say_instead(self.pending)

    def say_instead(self, text):
        """Print the interruption's message in the bar's place. Called from a signal handler."""
        if self.writing:
            self.pending = text
            return
        bar, self.bar, self.pending = self.bar, "", ""
        self.say(blank(bar) + text.lstrip("\n") if bar else text)


def blank(bar):
    """Text that blanks the bar, and two columns more, for the terminal's echo of Ctrl-C."""
    return "\r" + " " * (len(bar) + 2) + "\r"
