"""The ranks of a run on several GPUs, a process each. torchrun starts and watches them (--gpus N is
torchrun on this machine; mpirun and `srun -K` work, too), torch.distributed (gloo) carries the few
values that they agree on, and NCCL carries tensors (zero.py). On several machines, -o is a
directory that all of them share."""

import contextlib
import dataclasses
import datetime
import logging
import os
import signal
import socket
import sys
import textwrap
import time
import traceback
import zlib

import numpy as np

from llmc.errors import UserError, describe, import_package
from llmc.gpu.device import cp
from llmc.settings import flag_of
from llmc.single_process import TORCHRUN, SingleProcess
from llmc.tensors import flat

USER = "a run on several GPUs"
LOST = ("a rank ended unexpectedly, or does not answer; the last checkpoint, if any, is whole:"
        " resume with -y 1")
# for the ranks to meet, and for an answer of a rank that lives
PATIENCE = datetime.timedelta(minutes=10)


class Ranks(SingleProcess, contextlib.AbstractContextManager):
    """The processes of a run, seen from one; SingleProcess documents the methods. A program's
    outermost `with` block: an error on one rank ends all, with one line on stderr. Only rank 0
    prints; what others print is discarded."""

    def __init__(self, environ):
        """Meet the others, as torchrun's variables in environ say; raises UserError if that
        fails."""
        # a closed connection is a UserError here, and no warning
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # no Python handler runs during the meeting
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.distributed = distributed = import_package("torch.distributed", USER)
        self.tensor = import_package("torch", USER).tensor
        try:
            self.rank, self.size, self.local_rank = (int(environ[name]) for name in TORCHRUN)
            self.store = next(distributed.rendezvous("env://", timeout=PATIENCE))[0]
            distributed.init_process_group("gloo", store=self.store, rank=self.rank,
                                           world_size=self.size, timeout=PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"the ranks cannot meet ({str(error).splitlines()[0]}): set MASTER_ADDR"
                            " to the host of rank 0, and MASTER_PORT to a free port of"
                            " it, for all") from None
        signal.signal(signal.SIGINT, before)
        self.is_first = self.rank == 0
        if not self.is_first:
            sys.stdout = sys.stderr = open(os.devnull, "w")
        # in another container, a process is hidden
        places = self.gather((socket.gethostname(), f"/proc/{os.getpid()}"))
        self.neighbours = [path for host, path in places if host == socket.gethostname()
                           and os.path.exists(path)]

    def gather(self, value):
        values = [None] * self.size
        self.carry(self.distributed.all_gather_object, values, value)
        return values

    def gather_numbers(self, values):
        """`gather` of a few floats each, not pickled."""
        mine = self.tensor(values, dtype=float)
        found = [mine.clone() for _ in range(self.size)]
        self.carry(self.distributed.all_gather, found, mine)
        return [tensor.tolist() for tensor in found]

    def attempt(self, function):
        try:
            result = function()
        except UserError as error:
            result = error
        results = self.gather(result)
        for rank, result in enumerate(results):
            if isinstance(result, UserError):
                raise UserError(f"rank {rank}: {result}" if rank else str(result))
        return results

    def largest(self, number):
        # not pickled, as each step asks for it
        largest = self.tensor(-1 if number is None else number)
        self.carry(self.distributed.all_reduce, largest, self.distributed.ReduceOp.MAX)
        return None if largest < 0 else largest.item()

    def starmap(self, function, items, check):
        mine = {}
        for i, item in enumerate(items):
            if i % self.size == 0:
                check()
            if i % self.size == self.rank:
                mine[i] = function(*item)
        results = dict(pair for share in self.gather(mine) for pair in share.items())
        return [results[i] for i in range(len(results))]

    def carry(self, operation, *arguments):
        try:
            operation(*arguments)
        except RuntimeError:  # a connection is closed
            raise UserError(LOST) from None

    def check(self):
        """Raise UserError if a rank on this machine has died, for which a GPU here may be
        waiting."""
        if not all(map(os.path.exists, self.neighbours)):
            raise UserError(LOST)

    def check_alike(self, gpu, settings, config, params, *loaders):
        """Raise UserError if ranks differ in flags (but for file names), models, data or kinds of
        GPU, or share one."""
        fields = [field for field in dataclasses.fields(settings)
                  if field.metadata["group"] != "files"]
        found = {flag_of(settings, field.name): getattr(settings, field.name) for field in fields}
        sample = flat(params)[:: 1 + (flat(params).size >> 20)]  # all of them would take seconds
        found |= {"GPU": gpu, "model": (config, zlib.crc32(np.ascontiguousarray(sample)))}
        for what, loader in zip(("training data", "validation data"), loaders):  # None: with -v 0
            found[what] = loader and ([shard.size for shard in loader.shards],
                                      zlib.crc32(loader.read(0, range(1))[0].tobytes()))
        place = f"{cp.cuda.Device().pci_bus_id} of {socket.gethostname()}"
        everyone = self.gather((place, found))
        twin = [place for place, _ in everyone].index(place)
        # with NCCL 2.30, ranks can share one
        if twin != self.rank and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise UserError(f"ranks {twin} and {self.rank} have the same GPU ({place}): start one"
                            " process for each GPU")
        for what, first in everyone[0][1].items():
            if found[what] != first:
                raise UserError(f"{what}: rank {self.rank} has {found[what]}, rank 0 {first}:"
                                " expected the same flags, files and kind of GPU on all ranks")

    def __exit__(self, kind, error, trace):
        try:
            if error is None or isinstance(error, SystemExit) and not error.code:
                self.gather(None)
                # torchrun sends it, once a stopped rank has left with 128 + n
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                return self.distributed.destroy_process_group()
        except UserError as lost:
            error = lost
        if isinstance(error, SystemExit):  # argparse has said why
            text = None
            status = error.code
        elif isinstance(error, (UserError, MemoryError, OSError, KeyboardInterrupt)):
            text, status = describe(error)
        else:
            text = "".join(traceback.format_exception(error)).rstrip()
            status = 1
        time.sleep(0 if self.is_first else 0.5)  # rank 0 reports what all have
        # nobody reads stderr; rank 0 is gone, and with it the store
        with contextlib.suppress(OSError, RuntimeError):
            if text and self.store.add("errors", 1) == 1:
                rank = "" if self.is_first else f"rank {self.rank}: "
                text = textwrap.indent(f"{os.path.basename(sys.argv[0])}: {text}", rank)
                print(text, file=sys.__stderr__, flush=True)
            sys.stdout.flush()
        # at a normal exit, destructors would wait for the GPU, and it for a rank that is gone
        os._exit(status)


def start_ranks(count):
    """Run this program as `count` ranks under torchrun; return the exit status of the first that
    failed, or 0."""
    logging.disable()  # torchrun's; the ranks say what is wrong
    os.environ.setdefault("OMP_NUM_THREADS", str((os.cpu_count() or 1) // count or 1))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")  # seconds to save after Ctrl-C
    import_package("torch", USER)
    from torch.distributed import run
    from torch.distributed.launcher.api import ChildFailedError, SignalException
    signals = ",".join(name for name in ("SIGINT", "SIGTERM", "SIGHUP")
                       # as under nohup
                       if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN)
    try:
        run.run(run.parse_args(["--standalone", f"--nproc-per-node={count}",
                                f"--signals-to-handle={signals}", *sys.argv]))
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode < 0:
            raise UserError(f"rank {rank} died of {signal.Signals(-first.exitcode).name}: resume"
                            " with -y 1") from None
        return first.exitcode
    except SignalException as stop:
        return 128 + stop.sigval
    return 0
