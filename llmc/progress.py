"""What a run prints: a header, a line per update with the time left, and on a terminal a progress bar below the lines."""

import os
import shutil
import sys
import time


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


class Console:
    """Prints a run's lines, which count updates done, on CPU and GPU alike:

        step  20/500 | val loss 4.1234
        step  21/500 | train loss 4.0517 | 0.64 s | 402 tok/s | 5 min left

    On a GPU whose peak is known, train lines also show MFU, the model FLOPs utilization. On a terminal, if tqdm is
    installed, its bar stays below the lines.
    """

    counts_from = 1  # the number of a run's first update

    def __init__(self, loop):
        self.loop, self.settings = loop, loop.settings
        self.done, self.seconds, self.skipped = loop.begin, 0.0, 0  # of all updates so far
        self.doing, self.val_loss, self.peak, self.first_update = "", None, None, lambda: None
        self.format_meter, self.bar, self.drawn = None, "", 0.0  # tqdm's, if there is a bar; its text; drawn when

    def header(self, device, peak):
        """Print what the run is; with --verbose, all settings, too. device: its name; peak: tokens/s at which matmuls
        would use all of the device's FLOP/s, or None."""
        settings, loader, val_loader, self.peak = self.settings, self.loop.train_loader, self.loop.val_loader, peak
        epochs = settings.steps * settings.micro_steps / loader.batches_per_epoch
        validates = min(settings.val_batches, val_loader.whole_batches) if val_loader else 0
        sizes = vars(self.loop.config)
        order = *(name for name in sizes if name not in ("maxT", "V", "Vp")), "maxT", "V"
        config = " ".join(f"{name}={sizes[name]}" for name in order)
        rows = [
            ("model", f"{self.loop.model_path}: {config}, {self.loop.parameters:,} parameters"),
            ("data", f"{settings.data}: {loader.batches_per_epoch} batches of {settings.B} x {settings.T} tokens,"
                     f" {validates} to validate"),
            ("run", f"{settings.steps} steps of {settings.update_tokens} tokens: {epochs:.2f} epochs"),
            ("device", device),
            ("output", settings.output or "none; with -o DIR, the model is saved there"),
        ]  # fmt: skip
        if settings.verbose:
            print_table([list(vars(settings).items()), rows])
            return
        for name, value in rows:
            print(f"{name:<9} {value}")

    def memory(self, plan):
        """Print [(bytes, what for)]: in one line or, with --verbose, a line per entry."""
        if not self.settings.verbose:
            size = sum(size for size, _ in plan)
            print(f"memory    {f'{size / 2**30:.1f} GiB' if size >> 30 else f'{size / 2**20:.0f} MiB'}")
            return
        for size, what in plan:
            print(f"allocated {-(-size // (1 << 20))} MiB for {what}")

    def start(self):
        """Call this before the first update."""
        self.began = self.timed_from = time.perf_counter()
        if sys.stdout.isatty() and os.environ.get("TQDM_DISABLE", "0") in ("", "0"):
            try:
                from tqdm import tqdm

                self.format_meter = tqdm.format_meter
            except ImportError:  # training does not need it
                pass

    def number(self, step):
        """The number that the lines give to update number `step`, from 0."""
        return step + self.counts_from

    def validation(self, step, loss):
        self.val_loss = loss
        self.print(f"{self.step_of(step)} | val loss {loss:.4f}")

    def hellaswag(self, step, correct, count):
        self.print(f"{self.step_of(step)} | HellaSwag {correct}/{count} = {correct / count:.4f}")

    def training(self, step, loss, seconds):
        """Print the line of update number `step`, from 0, which took `seconds`."""
        first = self.done == self.loop.begin
        self.done, self.seconds, self.doing = step + 1, self.seconds + seconds, "training"
        left = self.time_left(seconds)
        if self.done % self.settings.print_every and not first and self.done != self.settings.steps:
            self.draw()
            return
        self.print(self.training_line(step, loss, seconds, left))
        if first:
            self.first_update()

    def training_line(self, step, loss, seconds, left):
        rate = self.settings.update_tokens / seconds
        words = [self.step_of(self.done), f"train loss {loss:.4f}", step_time(seconds), f"{rate:.0f} tok/s"]
        if self.peak:
            words.append(f"{rate / self.peak:.1%} MFU")
        if self.done < self.settings.steps:
            words.append(f"{duration(left)} left")
        return " | ".join(words)

    def skip(self, step, reason):
        """Print why update number `step`, from 0, was skipped."""
        self.skipped += 1
        self.print(f"{self.step_of(self.number(step))} | update skipped: {reason}")

    def end(self):
        """Print the last lines of a complete run."""
        self.erase()
        if self.skipped:
            print(f"updates skipped: {self.skipped}")
        if self.done > self.loop.begin:
            self.print_end(self.done - self.loop.begin)

    def print_end(self, steps):
        rate = f"{self.settings.update_tokens * steps / self.seconds:.0f} tok/s"
        where = f"; the model is in {self.settings.output_dir}" if self.settings.output_dir else ""
        print(f"{steps} steps in {duration(time.perf_counter() - self.began)}, {rate} while training{where}")

    def step_of(self, done):
        total = str(self.settings.steps)
        return f"step {done:>{len(total)}}/{total}"

    def time_left(self, seconds):
        """Seconds left at the pace so far. Validation and the like count; the first update, a warm-up, does not."""
        now, before = time.perf_counter(), self.done - self.loop.begin - 1  # updates since the first one
        if before == 0:
            self.timed_from = now
        pace = (now - self.timed_from) / before if before else seconds
        return pace * (self.settings.steps - self.done)

    # -- the bar: one line at the bottom, overwritten by the next line that is printed

    def wait_for(self, what):
        """Show in the bar what the run is doing now."""
        self.doing = what
        self.draw(at_once=True)

    def print(self, line):
        print(f"\r{line:<{len(self.bar)}}" if self.bar else line)
        self.bar = ""
        self.draw()

    def draw(self, at_once=False):
        """Redraw the bar, at most ten times a second unless at_once or hidden."""
        now = time.perf_counter()
        if not self.format_meter or self.bar and not at_once and now < self.drawn + 0.1:
            return
        postfix = f"val loss {self.val_loss:.4f}" if self.val_loss is not None else None
        ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
        bar = self.format_meter(self.done, self.settings.steps, now - self.began, shutil.get_terminal_size().columns - 3,
                                self.doing, ascii_only, initial=self.loop.begin, postfix=postfix,
                                bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}")
        print("\r" + bar.ljust(len(self.bar)), end="", flush=True)
        self.bar, self.drawn = bar, now

    def erase(self):
        if self.bar:
            print("\r" + " " * len(self.bar) + "\r", end="", flush=True)
            self.bar = ""


class LlmcLines(Console):
    """The lines of llm.c's CPU program of April 2024, to the byte, with --lines llmc."""

    counts_from = 0

    def header(self, device, peak):
        config, train, val = self.loop.config, self.loop.train_loader, self.loop.val_loader
        print(f"[{self.loop.architecture.TITLE}]")
        print(f"max_seq_len: {config.maxT}")
        print(f"vocab_size: {config.V}")
        print(f"num_layers: {config.L}")
        print(f"num_heads: {config.NH}")
        print(f"channels: {config.C}")
        print(f"num_parameters: {self.loop.parameters}")
        print(f"train dataset num_batches: {train.num_batches}")
        print(f"val dataset num_batches: {val.num_batches if val else 0}")

    def memory(self, plan):
        if self.settings.verbose:
            super().memory(plan)
        print(f"num_activations: {next(size for size, what in plan if what == 'activations') // 4}")

    def start(self):
        self.began = self.timed_from = time.perf_counter()

    def validation(self, step, loss):
        print(f"val loss {loss:f}")

    def hellaswag(self, step, correct, count):
        print(f"HellaSwag {correct}/{count} = {correct / count:.4f}")

    def training_line(self, step, loss, seconds, left):
        return f"step {step}: train loss {loss:f} (took {seconds * 1000:f} ms)"

    def print_end(self, steps):
        pass
