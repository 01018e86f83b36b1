"""Launchers, which start the processes of a run on several GPUs: how each process learns its rank and where to meet.

    torchrun --nproc-per-node 4 train_gpt2_cuda.py
    mpirun -np 4 python train_gpt2_cuda.py         (or mpiexec, of Open MPI, MPICH or Intel)
    srun -n 4 python train_gpt2_cuda.py
    RANK=0 WORLD_SIZE=4 python train_gpt2_cuda.py  (and 1, 2, 3, by hand)
    python train_gpt2_cuda.py --gpus 4             (on this machine: start_ranks)

Each launcher sets its own environment variables. MASTER_ADDR and MASTER_PORT, if set, say where rank 0 is.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
import zlib
from typing import NamedTuple

from llmc.errors import UserError

# ----------------------------------------------------------------------------------------------------------------------
# who is who


class Launcher(NamedTuple):
    """The environment variables that a launcher sets."""

    name: str
    rank: str
    size: tuple  # the first of them that is set counts; so for the next two
    local_rank: tuple
    local_size: tuple
    run: tuple  # all that are set, together, tell this run from others


RUN = "RANKS_RUN_ID"  # set by start_ranks, below
LAUNCHERS = (
    Launcher("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",),
             ("TORCHELASTIC_RUN_ID", RUN)),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
             ("OMPI_COMM_WORLD_LOCAL_SIZE",), ("PMIX_NAMESPACE",)),
    Launcher("MPICH", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
             ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), ("SLURM_JOB_ID",)),
    Launcher("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (),
             ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)  # fmt: skip
HINT = "start the program with torchrun, mpirun, srun or --gpus, which set it"
SPECIAL_STEPS = 0xFFFFFFF0  # from here on, Slurm's step ids are batch scripts and interactive shells, not `srun -n`


class Launch(NamedTuple):
    """What a launcher says about this process; local_rank, local_size: None if it does not say."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    launcher: Launcher | None = None


def find_launch(environ):
    """The Launch of this process: rank 0 of 1 if no launcher started it. Raises UserError for an invalid variable."""
    launcher = next((launcher for launcher in LAUNCHERS if has_started_this(launcher, environ)), None)
    if launcher is None:
        return Launch()

    def number(names, least):
        """(the first of these variables that is set, its value), or (None, None)."""
        name = next((name for name in names if name in environ), None)
        if name and not (re.fullmatch("[0-9]{1,9}", environ[name]) and int(environ[name]) >= least):
            raise UserError(f"{name}={environ[name]}: expected a number from {least}: {HINT}")
        return name, int(environ[name]) if name else None

    (size_name, size), (_, rank) = number(launcher.size, 1), number((launcher.rank,), 0)
    if size is None:
        raise UserError(f"{launcher.rank}={rank}, and {launcher.size[0]} is not set: {HINT}")
    if rank >= size:
        raise UserError(f"{launcher.rank}={rank}: expected less than {size_name}={size}: {HINT}")
    return Launch(rank, size, number(launcher.local_rank, 0)[1], number(launcher.local_size, 1)[1], launcher)


def has_started_this(launcher, environ):
    if launcher.rank not in environ:
        return False
    # a batch script has SLURM_PROCID=0 and SLURM_NTASKS, too, and is one process
    step = environ.get("SLURM_STEP_ID", "")
    srun = step.isdecimal() and int(step) < SPECIAL_STEPS
    if launcher.name == "MPICH":  # `srun --mpi=pmi2` sets PMI_RANK, too
        return not srun or any(name in environ for name in launcher.local_rank)
    return srun or launcher.name != "Slurm"


# ----------------------------------------------------------------------------------------------------------------------
# where they meet

PORT = 29500  # as in PyTorch
PORTS = 16  # tried one after the other: other runs, or torchrun, may listen on some


class Place(NamedTuple):
    """Where rank 0 listens: on the first free port of `ports`. The others try them until one answers for `run`."""

    host: str
    ports: tuple
    run: str


def meeting_place(launch, environ):
    """The Place where ranks meet: MASTER_ADDR and MASTER_PORT, if set; raises UserError if rank 0's host is unknown."""
    run = ".".join(environ[name] for name in launch.launcher.run if name in environ)
    port = environ.get("MASTER_PORT", str(PORT + zlib.crc32(run.encode()) % 1000 if run else PORT))
    if not re.fullmatch("[0-9]{1,5}", port) or not 1024 <= int(port) < 1 << 16:
        raise UserError(f"MASTER_PORT={port}: expected a port from 1024 to 65535")
    first = int(port)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens on MASTER_PORT; the next ports
        first += PORTS  # are for torchrun's other runs
    ports = tuple((first + i - 1024) % ((1 << 16) - 1024) + 1024 for i in range(PORTS))
    return Place(environ.get("MASTER_ADDR") or host_of_rank_0(launch, environ), ports, f"{run}:{port}")


def host_of_rank_0(launch, environ):
    if launch.launcher.name == "Slurm":
        nodes = environ.get("SLURM_STEP_NUM_NODES", "1"), environ.get("SLURM_STEP_NODELIST", "")
    else:
        elsewhere = launch.local_size is not None and launch.local_size < launch.size
        nodes = str(1 + elsewhere), environ.get("SLURM_JOB_NODELIST", "")
    if nodes[0] == "1":
        return "127.0.0.1"
    if not nodes[1]:
        raise UserError("the ranks are on several machines, and MASTER_ADDR is not set: set it to the host of rank 0,"
                        " on all of them (mpirun -x MASTER_ADDR, mpiexec -genvlist MASTER_ADDR)")
    return first_host(nodes[1])


def first_host(nodelist):
    """'node01' of Slurm's 'node[01-04,7],other'."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodelist)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


# ----------------------------------------------------------------------------------------------------------------------
# --gpus: a launcher of our own, for one machine

PARENT = "RANKS_PARENT"  # variable: descriptor of a pipe that closes when start_ranks' process ends
FOLLOW_SECONDS = 15  # for the others to end after one has failed


def start_ranks(count, argv=sys.argv):
    """Run the program as `count` ranks on this machine; returns the exit status of the first that failed, or 0.

    Passes on Ctrl-C, SIGTERM and SIGHUP. Each rank has its own session, so that a terminal's Ctrl-C reaches it only
    once. If this process is killed, the ranks save and stop, as after SIGTERM.
    """
    pipe, kept_open = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
               RUN: uuid.uuid4().hex, PARENT: str(pipe)}
    children, signals = [], []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # by nohup
            signal.signal(number, lambda number, frame: signals.append(number))
    try:
        for rank in range(count):
            children.append(subprocess.Popen([sys.executable, *argv], pass_fds=(pipe,), start_new_session=True,
                                             env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        return wait_for(children, signals)
    finally:
        for child in children:
            child.kill()  # none still runs, unless another could not be started
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(pipe)
        os.close(kept_open)


def wait_for(children, signals):
    """Wait for all children to end; returns the exit status of the first that failed (128 + n after signal n), or 0.

    Passes on the signals that a handler appends to `signals`. Children that still run FOLLOW_SECONDS after one has
    failed are killed: they may be waiting for that one to connect.
    """
    failed, deadline = None, float("inf")
    while True:
        running = [child for child in children if child.poll() is None]
        if not failed and (failed := next((child for child in children if child.returncode), None)):
            code = failed.returncode
            status, deadline = 128 - code if code < 0 else code, time.monotonic() + FOLLOW_SECONDS
        if not running:
            return status if failed else 0
        if time.monotonic() > deadline:
            for child in running:
                child.kill()
            print(f"{os.path.basename(sys.argv[0])}: error: rank {children.index(failed)} has ended with exit status"
                  f" {status}; {names_of(map(children.index, running))} did not end, and were killed", file=sys.stderr)
            deadline = float("inf")
        while signals:
            number = signals.pop(0)
            for child in running:
                child.send_signal(number)
        time.sleep(0.02)


def names_of(ranks):
    """'rank 2', 'ranks 1, 2 and 5'."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
