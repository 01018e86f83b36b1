"""How a GPU program starts: one process per GPU, all with the same flags and model, on GPUs of one kind."""

import dataclasses
import functools
import os
import socket
import time
import zlib

import numpy as np

from llmc.gpu.device import cp, gpu_errors_as_lines
from llmc.errors import UserError
from llmc.gpu.launchers import find_launch, start_ranks
from llmc.gpu.ranks import join
from llmc.settings import flag_of, parse_settings
from llmc.tensors import flat


def on_ranks(settings_class, description, work):
    """Run work(settings, ranks) on each rank, and return the exit status. If no launcher started several, --gpus starts
    them here. settings_class has a field `gpus`."""
    parse = functools.partial(parse_settings, settings_class, description)
    if find_launch(os.environ).size == 1 and (gpus := parse().gpus) > 1:
        return start_ranks(gpus)  # each of them comes here, too, but with a launcher
    with join() as ranks, gpu_errors_as_lines():
        with ranks.said_once():
            settings = parse()
        if settings.gpus not in (1, ranks.local_size):
            raise UserError(f"--gpus {settings.gpus}: a launcher has started {ranks.local_size} on this machine: start"
                            f" {settings.gpus}, or leave the launcher out")
        settings = dataclasses.replace(settings, gpus=ranks.size)
        settings.check()
        return work(settings, ranks)


def check_alike(ranks, gpu, settings):
    """Raise UserError if two ranks share a GPU, or have different kinds of GPU or different flags. (File names may
    differ between machines.) With NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL 2.30 knows, ranks may share a GPU."""
    if ranks.size == 1:
        return
    names = [field.name for field in dataclasses.fields(settings) if field.metadata["group"] != "files"]
    output = "no directory" if settings.output_dir is None else "a directory"
    given = ranks.gather([output, *(getattr(settings, name) for name in names)])
    for rank, values in enumerate(given):
        for name, value, first in zip(("output", *names), values, given[0]):
            if value != first:
                raise UserError(f"{flag_of(settings, name)}: rank {rank} has {value}, rank 0 {first}: pass the same"
                                " flags to all")
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    found = ranks.gather([socket.gethostname(), cp.cuda.Device().pci_bus_id, list(gpu)])
    for rank, (host, bus, other) in enumerate(found):
        first = [place[:2] for place in found].index([host, bus])
        if first != rank and not may_share:
            raise UserError(f"ranks {first} and {rank} have the same GPU ({other[0]} at {bus} of {host}): start one"
                            " process for each GPU")
        if other != found[0][2]:
            raise UserError(f"rank {rank} has a {other[0]}, rank 0 a {found[0][2][0]}: expected GPUs of one kind")


def check_same_files(ranks, config, params, train_loader, val_loader, examples):
    """Raise UserError if a rank has read another model or other data than rank 0."""
    if ranks.size == 1:
        return
    weights = flat(params)
    sample = np.ascontiguousarray(weights[:: 1 + (weights.size >> 20)])  # all of them would take seconds
    read = {"model": [config.describe(), zlib.crc32(sample)]}
    for what, loader in (("training data", train_loader), ("validation data", val_loader)):
        if loader:
            first = loader.shards[0]
            with first.open() as f:
                tokens = first.read(f, 0, min(first.size, 1 << 20))
            read[what] = [f"{sum(shard.size for shard in loader.shards)} tokens in {len(loader.shards)} files",
                          zlib.crc32(tokens)]
    if examples:
        tokens = np.concatenate([part for example in examples for part in (example.context, *example.endings)])
        read["HellaSwag"] = [f"{len(examples)} examples", zlib.crc32(tokens)]
    for rank, found in enumerate(reads := ranks.gather(read)):
        for what, first in reads[0].items():
            if found[what] != first:
                raise UserError(f"rank {rank} has another {what} than rank 0, or other contents: {found[what][0]}"
                                f" beside {first[0]}: pass the same files to all")
