"""What a run prints: a header, a line per update with the time left, and below them, on a terminal,
a progress bar."""

import contextlib
import dataclasses
import sys
import time

from llmc.resume import checkpoint_paths

def print_table(groups):
    """Print groups of (name, value) in a box."""
    names, width = (max(low, *(len(str(row[i])) for rows in groups for row in rows))
                    for i, low in ((0, 21), (1, 50)))
    line = f"+-{'-' * names}-+-{'-' * width}-+"
    for rows in groups:
        print(line)
        for name, value in rows:
            print(f"| {name:<{names}} | {str(value):<{width}} |")
    print(line)


def duration(seconds):
    """'45 s', '5 min', '2 h 10 min', '3 d 4 h'."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if 60 * hours + minutes < 100:
        return f"{60 * hours + minutes} min"
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


class Console:
    """Prints a run's lines, which count updates done (the head of train_gpt2.py shows some). On a
    GPU whose peak is known, they also show MFU, the model FLOPs utilization. On a terminal, if tqdm
    is installed, its bar stays below."""

    # the number of a run's first update; whether a terminal shows the bar
    counts_from, has_bar = 1, True

    def __init__(self, loop):
        self.loop = loop
        self.settings = loop.settings
        self.done = loop.begin
        self.seconds = 0.0
        self.skipped = 0  # of all updates so far
        self.peak = self.bar = None

    def header(self, device, peak):
        """device: its name; peak: tokens/s at which matmuls would use all of the device's FLOP/s,
        or None."""
        settings = self.settings
        loader = self.loop.train_loader
        val_loader = self.loop.val_loader
        self.peak = peak
        epochs = settings.steps * settings.micro_steps / loader.batches_per_epoch
        validates = min(settings.val_batches, val_loader.whole_batches) if val_loader else 0
        sizes = [field.name for field in dataclasses.fields(self.loop.config)
                 if field.default is dataclasses.MISSING]
        order = *(name for name in sizes if name not in ("maxT", "V", "Vp")), "maxT", "V"
        config = " ".join(f"{name}={getattr(self.loop.config, name)}" for name in order)
        rows = {
            "model": f"{self.loop.model_path}: {config}, {self.loop.parameters:,} parameters",
            "data": f"{settings.data}: {loader.batches_per_epoch} batches of {settings.B} x"
                    f" {settings.T} tokens, {validates} to validate",
            "run": f"{settings.steps} steps of {settings.update_tokens} tokens: {epochs:.2f} epochs",
            "device": device, "output": settings.output
            or "none; with -o DIR, the model is saved there"}
        if settings.verbose:
            print_table([vars(settings).items(), rows.items()])
        else:
            print("\n".join(f"{name:<9} {value}" for name, value in rows.items()))

    def memory(self, plan, largest_batch=None):
        """Print the plan, [(bytes, purpose)]: the sum or, with --verbose, a line per entry. On a GPU,
        also the largest batch that fits."""
        if self.settings.verbose or self.settings.lines == "llmc":
            for size, what in plan:
                print(f"allocated {-(-size // (1 << 20))} MiB for {what}")
        else:
            size = sum(size for size, _ in plan)
            size = f"{size / 2**30:.1f} GiB" if size >> 30 else f"{size / 2**20:.0f} MiB"
            most = f"; up to -b {largest_batch} fits" if largest_batch else ""
            print(f"memory    {size}{most}")

    def start(self):
        self.began = self.timed_from = time.perf_counter()
        if self.has_bar and sys.stdout.isatty():
            with contextlib.suppress(ImportError):  # training does not need it
                from tqdm import tqdm

                self.bar = tqdm(total=self.settings.steps, initial=self.loop.begin, file=sys.stdout,
                                leave=False, miniters=1, dynamic_ncols=True,
                                bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}")

    def validation(self, step, loss, targets):
        """targets: how many have a weight; None if there are no weights."""
        of = "" if targets is None else f" of {targets} targets"
        self.print(f"{self.step_of(step)} | val loss {loss:.4f}{of}")

    def overfits(self, step, lowest, at):
        self.print(f"{self.step_of(step)} | validation was lowest at step {at}, {lowest:.4f}: more"
                   " steps overfit (--patience stops then, and keeps the best model)")

    def stops_early(self, step, lowest, at):
        """Print why --patience ends the run at this step, and which checkpoint is the best."""
        best = "nothing is saved without -o DIR"
        if self.settings.output_dir:
            best = f"the best checkpoint is {checkpoint_paths(self.settings.output_dir, at)[0]}"
        patience = self.settings.patience
        self.print(f"{self.step_of(step)} | stopped by --patience {patience}: that many validations"
                   f" in a row were above {lowest:.4f}, of step {at}; {best}")

    def hellaswag(self, step, correct, count):
        self.print(f"{self.step_of(step)} | HellaSwag {correct}/{count} = {correct / count:.4f}")

    def training(self, step, update, learning_rate):
        """Print the line of update number `step`, from 0, an Update. The time left is at the pace
        so far, validation included, but not the first update, a warm-up."""
        now = time.perf_counter()
        before = step - self.loop.begin  # of this run's updates
        if not before:
            self.timed_from = now
        self.done = step + 1
        self.seconds = self.seconds + update.seconds
        pace = (now - self.timed_from) / before if before else update.seconds
        left = pace * (self.settings.steps - self.done)
        if self.bar:
            self.bar.set_description_str("training", refresh=False)
            self.bar.set_postfix_str(f"{duration(left)} left", refresh=False)
            self.bar.update()
        if (not before or self.done % self.settings.print_every == 0
                or self.done == self.settings.steps):
            self.print(self.training_line(step, update, learning_rate, left))

    def training_line(self, step, update, learning_rate, left):
        rate = self.settings.update_tokens / update.seconds
        seconds = update.seconds
        loss_z, norm_z = (f" ({z:+.2f}z)" for z in update.z_scores) if update.z_scores else ("", "")
        words = [self.step_of(self.done), f"train loss {update.loss:.4f}{loss_z}"]
        if update.norm is not None:
            words += [f"norm {update.norm:.2f}{norm_z}", f"lr {learning_rate:.2e}"]
        words += [f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.2f} ms",
                  f"{rate:.0f} tok/s"]
        if self.peak:
            words.append(f"{rate / self.peak:.1%} MFU")
        if self.done < self.settings.steps:
            words.append(f"{duration(left)} left")
        return " | ".join(words)

    def skip(self, step, reason):
        """Print why update number `step`, from 0, was skipped."""
        self.skipped += 1
        self.print(f"{self.step_of(step + self.counts_from)} | update skipped: {reason}")

    def end(self):
        self.erase()
        if self.skipped:
            print(f"updates skipped: {self.skipped}")
        if steps := self.done - self.loop.begin:
            self.print_end(steps)

    def print_end(self, steps):
        rate = f"{self.settings.update_tokens * steps / self.seconds:.0f} tok/s"
        where = f"; the model is in {self.settings.output_dir}" if self.settings.output_dir else ""
        best = self.loop.lowest[1]
        if where and self.settings.patience and best != self.done:
            where += f", the best one of step {best}"
        print(f"{steps} steps in {duration(time.perf_counter() - self.began)}, {rate} while"
              f" training{where}")

    def step_of(self, done):
        total = str(self.settings.steps)
        return f"step {done:>{len(total)}}/{total}"

    def wait_for(self, what):
        """Show in the bar what the run is doing now."""
        if self.bar:
            self.bar.set_description_str(what)

    def print(self, line):
        with self.loop.interruption.output():
            (self.bar.write if self.bar else print)(line)

    def note(self, text):
        self.erase()
        with self.loop.interruption.output():
            print(f"note: {text}", file=sys.stderr)

    def erase(self):
        if self.bar:
            self.bar.clear()
