"""The ranks of a run of one process. llmc/gpu/several/ranks.py has those of a run on several GPUs."""

TORCHRUN = "RANK", "WORLD_SIZE", "LOCAL_RANK"  # the variables that torchrun sets


class SingleProcess:
    """Rank 0 of 1."""

    rank, size, local_rank, is_first, has_launcher = 0, 1, 0, True, False

    def gather(self, value):
        """Return the values of all ranks, in order, on every rank."""
        return [value]

    def attempt(self, function):
        """Call function() on each rank, and return all results, in order. A UserError on one rank is raised on all."""
        return self.gather(function())

    def check_alike(self, gpu, settings, config, params, *loaders):
        """Raise UserError if ranks have different flags, models, data or kinds of GPU, or share a GPU."""

    def largest(self, number):
        """Return the largest number of all ranks, with None as 0; None if all are None."""
        return number

    def starmap(self, function, items, check):
        """Yield function(*item) for each item, computed by one of the ranks. All call `check` once for `size` items."""
        for item in items:
            check()
            yield function(*item)


SINGLE_PROCESS = SingleProcess()
