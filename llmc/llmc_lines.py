"""The lines of llm.c's programs of April 2024, to the byte, with --lines llmc."""

from llmc.progress import Console, print_table


class LlmcLines(Console):
    """Those of its CPU program."""

    counts_from, has_bar = 0, False

    def header(self, device, peak):
        config, train, val = self.loop.config, self.loop.train_loader, self.loop.val_loader
        print(f"[{self.loop.architecture.TITLE}]")
        for name, value in (("max_seq_len", config.maxT), ("vocab_size", config.V), ("num_layers", config.L),
                            ("num_heads", config.NH), ("channels", config.C), ("num_parameters", self.loop.parameters),
                            ("train dataset num_batches", train.num_batches),
                            ("val dataset num_batches", val.num_batches if val else 0)):
            print(f"{name}: {value}")

    def memory(self, plan):
        print(f"num_activations: {next(size for size, what in plan if what == 'activations') // 4}")

    def validation(self, step, loss):
        print(f"val loss {loss:f}")

    def training_line(self, step, update, learning_rate, left):
        return f"step {step}: train loss {update.loss:f} (took {update.seconds * 1000:f} ms)"

    def nothing(self, *_):
        """The program has no such lines."""

    overfits = print_end = nothing


class LlmcCudaLines(LlmcLines):
    """Those of its CUDA program."""

    counts_from, memory = 1, Console.memory

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
        *gpu, precision = device.split(", ", 3)
        device = [("device", ", ".join(gpu)), ("precision", precision)]
        data = [("train batches", loop.train_loader.num_batches), ("val batches", val.num_batches if val else 0)]
        print_table([run, device, model, data])

    def training_line(self, step, update, learning_rate, left):
        took = f"{update.seconds * 1000:f} ms, {self.settings.update_tokens / update.seconds:.0f} tok/s"
        return f"step {step + 1:4d}/{self.settings.steps}: train loss {update.loss:f} ({took})"

    def print_end(self, steps):
        print(f"total average iteration time: {1000 * self.seconds / steps:f} ms")
