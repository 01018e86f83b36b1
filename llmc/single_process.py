"""The ranks of a run of one process, and whether a launcher has started several.
llmc/gpu/several/ranks.py has those of a run on several GPUs."""

import sys
import time

from llmc.errors import UserError

TORCHRUN = "RANK", "WORLD_SIZE", "LOCAL_RANK"  # the variables that torchrun sets
LAUNCHERS = (  # variables of rank, size, local rank
    TORCHRUN,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def is_srun(environ):
    """Whether srun started this process, not a batch script or an interactive shell of Slurm's."""
    return 0 <= int(environ.get("SLURM_STEP_ID", -1)) < 0xFFFFFFF0


def launcher_of(environ):
    """The variables of the launcher that has started several processes, one of LAUNCHERS, or
    None."""
    for names in LAUNCHERS:
        if (all(name in environ for name in names)
                and (names[0] != "SLURM_PROCID" or is_srun(environ))):
            return names if environ[names[1]] != "1" else None
    return None


def refuse_launchers(environ, program):
    """Raise UserError, in the first process that a launcher has started, and end the others later:
    each would train the same model on the same batches."""
    names = launcher_of(environ)
    if names is None:
        return
    if environ[names[0]] != "0":
        time.sleep(1.0)  # a launcher ends all once one fails, and the first has something to say
        sys.exit(1)
    gpu_program = program.replace(".py", "_cuda.py")
    raise UserError(f"{names[1]}={environ[names[1]]}: {program} is one process, with threads: run"
                    f" python {program}; on GPUs, {gpu_program} takes torchrun, mpirun and srun")


class SingleProcess:
    """Rank 0 of 1."""

    rank, size, local_rank, is_first, has_launcher = 0, 1, 0, True, False

    def gather(self, value):
        """Return the values of all ranks, in order, on every rank."""
        return [value]

    gather_numbers = gather

    def attempt(self, function):
        """Call function() on each rank, and return all results, in order. A UserError on one rank
        is raised on all."""
        return self.gather(function())

    def check_alike(self, gpu, settings, config, params, *loaders):
        """Raise UserError if ranks have different flags, models, data or kinds of GPU, or share a
        GPU."""

    def largest(self, number):
        """Return the largest number of all ranks, with None as 0; None if all are None."""
        return number

    def starmap(self, function, items, check):
        """Yield function(*item) for each item, computed by one of the ranks. All call `check` once
        for `size` items."""
        for item in items:
            check()
            yield function(*item)


SINGLE_PROCESS = SingleProcess()
