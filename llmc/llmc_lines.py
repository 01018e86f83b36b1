"""The lines of llm.c's programs of April 2024, to the byte, with --lines llmc."""

from llmc.progress import Console, print_table


class LlmcLines(Console):
    """Those of its CPU program."""

    counts_from, has_bar = 0, False

    def header(self, device, peak):
        config = self.loop.config
        train = self.loop.train_loader
        val = self.loop.val_loader
        print(f"[{self.loop.architecture.TITLE}]")
        for name, value in (("max_seq_len", config.maxT), ("vocab_size", config.V),
                            ("num_layers", config.L),
                            ("num_heads", config.NH), ("channels", config.C),
                            ("num_parameters", self.loop.parameters),
                            ("train dataset num_batches", train.num_batches),
                            ("val dataset num_batches", val.num_batches if val else 0)):
            print(f"{name}: {value}")

    def memory(self, plan, largest_batch=None):
        print(f"num_activations: {next(size for size, what in plan if what == 'activations') // 4}")

    def validation(self, step, loss, targets):
        print(f"val loss {loss:f}")

    def training_line(self, step, update, learning_rate, left):
        return f"step {step}: train loss {update.loss:f} (took {update.seconds * 1000:f} ms)"

    def nothing(self, *_):
        """The program has no such lines."""

    overfits = print_end = nothing


class LlmcCudaLines(LlmcLines):
    """Those of its CUDA program."""

    counts_from = 1
    ALLOCATED = {  # our names in the memory plan -> theirs
        "parameters": "model parameters", "gradients": "parameter gradients",
        "gradients of activations": "activation gradients", "AdamW's m": "AdamW optimizer state m",
        "AdamW's v": "AdamW optimizer state v"}

    def header(self, device, peak):
        settings = self.settings
        config = self.loop.config
        val = self.loop.val_loader
        if settings.verbose:
            print_table([list(vars(settings).items())])
        val_batches = min(settings.val_batches, val.whole_batches) if val else 0
        has_tf32 = settings.dtype == "float32" and settings.tf32
        line = f"+-{'-' * 21}-+-{'-' * 50}-+"
        print_rows(line, ("Parameter", "Value"))
        print_rows(line, ("input dataset prefix", settings.data),
                   ("output log file", settings.output or "NULL"),
                   ("batch size B", settings.B), ("sequence length T", settings.T),
                   ("learning rate", f"{settings.learning_rate:f}"),
                   ("val_loss_every", settings.val_every),
                   ("val_max_batches", settings.val_batches),
                   ("sample_every", settings.sample_every), ("genT", settings.sample_tokens))
        print_rows(line, ("device", device.partition(", ")[0]),
                   ("TF32", "enabled" if has_tf32 else "disabled"))
        print_rows(line, ("max_sequence_length T", config.maxT), ("vocab_size V", config.V),
                   ("num_layers L", config.L), ("num_heads NH", config.NH),
                   ("channels C", config.C), ("num_parameters", self.loop.parameters))
        print_rows(line, ("train_num_batches", settings.steps), ("val_num_batches", val_batches))
        print(line)

    def memory(self, plan, largest_batch=None):
        for size, what in plan:
            print(f"allocated {size >> 20} MiB for {self.ALLOCATED.get(what, what)}")

    def training_line(self, step, update, learning_rate, left):
        rate = int(self.settings.update_tokens / update.seconds)
        return (f"step {step + 1:4d}/{self.settings.steps}: train loss {update.loss:f}"
                f" ({update.seconds * 1000:f} ms, {rate} tok/s)")

    def print_end(self, steps):
        print(f"total average iteration time: {1000 * self.seconds / steps:f} ms")


def print_rows(line, *rows):
    """Print a part of the box, as wide as C's formats make it."""
    print(line)
    for name, value in rows:
        print(f"| {name:<21} | {value!s:<50} |")
