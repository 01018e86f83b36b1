"""Several GPUs, on none: shares of the parameters; W ranks train in threads of this process, on fake GPUs whose update
kernels are NumPy's; their checkpoints go on with another number of ranks."""

import contextlib
import ctypes
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import numpy as np
import pytest

import bench
import llmc.gpu.trainer
import timeline
import train_gpt2
import train_gpt2_cuda as cuda
from conftest import ROOT, SMALL_HEADS, FakeGPU, assert_one_line_error, random_params, run_program
from fake_gpus import Collectives, compute_on, here, stored
from llmc.checkpoint import (Config, Owned, Progress, owned_by_one, rank_path, read_optimizer_state, write_model,
                             write_optimizer_state)
from llmc.dataloader import open_data
from llmc.evaluation import Example
from llmc.files import HEADER_BYTES, OPTIMIZER_MAGIC, make_header
from llmc.outliers import RECENT
from llmc.gpu.ranks import Ranks
from llmc.resume import (checkpoint_paths, delete_old_checkpoints, find_checkpoint, newest_checkpoint,
                         save_checkpoint)
from llmc.settings import parse_settings
from llmc.shuffle import Position
from llmc.gpu.start import check_alike, check_same_files
from llmc.tensors import Row, allocate, flat
from llmc.gpu.zero import CHUNK, PARTS, Nccl, Shares

TABLES = {
    "gpt2": train_gpt2.parameter_table(Config(maxT=64, V=1003, L=3, NH=3, C=96, Vp=1024)),
    "small": train_gpt2.parameter_table(SMALL_HEADS),
    "odd": {"a": Row((7,)), "b": Row((3, 5, 11), stacked=True, decays=True), "c": Row((3, 1), stacked=True)},
}

# ----------------------------------------------------------------------------------------------------------------------
# shares


@pytest.mark.parametrize("table", TABLES)
def test_every_element_has_one_owner(table):
    """For any number of ranks; and each is in one chunk of its owner's, with its place in the share's buffers, and one
    for each rank's gradient among those that arrive, on all ranks from the same place on."""
    alone = Shares(TABLES[table], 1, 0.1)
    for ranks in range(1, 17):
        shares = Shares(TABLES[table], ranks, 0.1)
        owners, indices, total, arrives = np.zeros(shares.size, np.int8), [], None, {}
        for rank in range(ranks):
            chunks, ends, total = shares.chunks(rank)
            local = np.full(shares.size, -1)
            for piece in shares.pieces(rank):
                local[piece.begin : piece.begin + piece.size] = piece.local + np.arange(piece.size)
                owners[piece.begin : piece.begin + piece.size] += 1
            assert sorted(local[local >= 0]) == list(range(shares.share_size(rank)))
            found = np.full(shares.size, -1)
            for chunk in chunks:
                assert 0 < chunk["count"] <= CHUNK
                found[chunk["flat"] : chunk["flat"] + chunk["count"]] = chunk["local"] + np.arange(chunk["count"])
            assert np.array_equal(found, local)
            places = np.concatenate([chunks["received"] + r * chunks["stride"].astype(int) for r in range(ranks)])
            order, stops = np.argsort(places), places + np.tile(chunks["count"], ranks)
            assert (stops[order][:-1] <= places[order][1:]).all() and stops.max(initial=0) <= shares.received_size()
            for piece in shares.pieces(rank):
                assert arrives.setdefault(piece.segment, piece.received) == piece.received
            assert shares.share_size(rank) <= shares.share_size(ranks - 1)
            layers = [piece.segment.layer for piece in shares.pieces(rank)]
            for of_group, begin, end in zip((lambda l: l == 0, lambda l: l is None, lambda l: l), [0, *ends], ends):
                sizes = [piece.size for piece, layer in zip(shares.pieces(rank), layers) if of_group(layer)]
                assert sum(sizes) == chunks[begin:end]["count"].sum()
            indices += chunks["index"].tolist()
        assert (owners == 1).all() and sorted(indices) == list(range(total))
        if PARTS % ranks == 0:
            same = np.sort(np.concatenate([shares.chunks(rank)[0] for rank in range(ranks)]), order="flat")
            fields = ["flat", "count", "index", "decay", "at_random"]
            assert same[fields].tolist() == np.sort(alone.chunks(0)[0], order="flat")[fields].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# ranks as threads


class ThreadRanks(Collectives):
    """Of ranks.py's Ranks, and of zero.py's Nccl, what a trainer uses."""

    def __init__(self, rank, size, shared):
        self.rank = self.local_rank = rank
        self.size, self.is_first, self.shared = size, rank == 0, shared

    def gather(self, value):
        self.shared.values[self.rank] = value
        self.shared.barrier.wait()
        values = list(self.shared.values)
        self.shared.barrier.wait()
        return values

    attempt = Ranks.attempt

    def exchange(self, sends, receives, stream):
        stream.launched += 1
        for peer, array in sends:
            self.shared.messages[self.rank, peer].put(np.array(array))
        for peer, array in receives:
            array[...] = self.receive(peer)

    def receive(self, peer):
        while True:
            try:
                return self.shared.messages[peer, self.rank].get(timeout=0.1)
            except queue.Empty:
                if self.shared.barrier.broken:  # another thread has failed
                    raise threading.BrokenBarrierError from None

    def add_up(self, total, addend, stream):
        stream.launched += 1
        total[...] = sum(self.gather(np.array(addend)), np.zeros_like(addend))


def on_ranks(size, work):
    """[work(ranks) of each rank], in threads."""
    shared = SimpleNamespace(values=[None] * size, barrier=threading.Barrier(size), messages={
        (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)})
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = work(ThreadRanks(rank, size, shared))
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


@pytest.fixture
def computing_gpu(fake_gpu, monkeypatch):
    """A fake GPU on which a training step has results."""
    monkeypatch.setattr(cuda.cp, "RawModule", compute_on(fake_gpu))
    monkeypatch.setattr(llmc.gpu.trainer, "Nccl", lambda ranks: ranks)
    return fake_gpu


def train(ranks, settings, params, steps, resume=None, save=None):
    """(reports, weights, moments and float32 weights of the share) after some steps from a checkpoint's or none."""
    rng, directory = np.random.default_rng(0), settings.output
    trainer = here.trainer = cuda.open_trainer(FakeGPU().gpu, SMALL_HEADS, params, settings, ranks)
    first, reports = 0, []
    if resume:
        owned = trainer.state_room(with_exact=trainer.master is not None or not trainer.precision.bf16)
        progress, has_exact = read_optimizer_state(checkpoint_paths(directory, resume)[1], owned)
        trainer.set_state(owned if has_exact else owned._replace(exact=None), progress.step, np.zeros(2, RECENT))
        first = progress.step
    trainer.prepare()
    for step in range(first + steps):
        batches = rng.integers(0, SMALL_HEADS.V, (settings.micro_steps, 2, settings.B, settings.T), dtype=np.int32)
        if step >= first:
            number = trainer.begin_step(batches[ranks.rank :: ranks.size], 1e-2 / (step + 1))
            reports.append(trainer.end_step(number)[:2])
    trainer.complete_weights()
    if save:
        save_checkpoint(directory, SMALL_HEADS, trainer.params_now(), trainer.state_now(),
                        Progress(first + steps, 1, Position(), (2, 8, 0)), ranks=ranks,
                        version=5 if settings.precision.bf16 else 3)
    return reports, np.array(flat(trainer.params)), trainer.state_now()


@pytest.mark.parametrize("changes", (
    dict(dtype="bfloat16", grad_clip=1.0), dict(dtype="bfloat16", float32_grads=1, weight_decay=0.1),
    dict(dtype="float32", grad_clip=0.5, weight_decay=0.1), dict(dtype="bfloat16", master_weights=0)), ids=str)
def test_the_same_bits_on_any_number_of_gpus(computing_gpu, tmp_path, changes):
    """Losses, norms, weights, moments of 1, 2 and 4 ranks; also where each number goes on from what another one wrote.
    """
    settings = cuda.CudaSettings(B=2, T=8, total_batch_size=64, sample_every=0, output=str(tmp_path / "run"), graph=0,
                                 **changes)
    settings = cuda.settle(settings, "sm_90a")
    params, found = random_params(SMALL_HEADS), {}
    for size in (1, 2, 4):
        def work(ranks, **more):
            return train(ranks, cuda.dataclasses.replace(settings, gpus=size), params, **more)

        (tmp_path / "run").mkdir()
        first = on_ranks(size, lambda ranks: work(ranks, steps=2, save=True))
        for resumed in (1, 2, 4):
            shutil.copytree(tmp_path / "run", tmp_path / "copy")
            size = resumed
            rest = on_ranks(resumed, lambda ranks: work(ranks, steps=3, resume=2))
            found[len(first), resumed] = first[0][0] + rest[0][0], rest
            shutil.rmtree(tmp_path / "run")
            (tmp_path / "copy").rename(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
    whole_reports, whole = found[1, 1]
    assert len({loss for loss, _ in whole_reports}) == 5 and all(np.isfinite(whole_reports).reshape(-1))
    assert not np.array_equal(whole[0][1], stored(np.array(flat(params)), whole[0][1]))
    for (_, size), (reports, ranks) in found.items():
        assert reports == whole_reports
        shares = Shares(params.table, size)
        for rank, (_, weights, owned) in enumerate(ranks):
            assert np.array_equal(weights, whole[0][1])
            for ours, theirs in zip(owned[2:], whole[0][2][2:]):
                assert (ours is None) == (theirs is None)
                assert ours is None or np.array_equal(ours, shares.take(np.array(theirs), rank))


def test_shares_of_different_sizes(computing_gpu, tmp_path, monkeypatch):
    """Of three ranks, which no tensor divides: the weights are those of one, and what arrives has its place."""
    monkeypatch.setitem(globals(), "SMALL_HEADS", Config(maxT=64, V=257, L=3, NH=5, C=80, Vp=384))
    settings = cuda.settle(cuda.CudaSettings(B=2, T=8, total_batch_size=48, sample_every=0, output=str(tmp_path),
                                             graph=0), "sm_90a")
    params = random_params(SMALL_HEADS)
    one, three = (on_ranks(size, lambda ranks: train(ranks, cuda.dataclasses.replace(settings, gpus=size), params, 3))
                  for size in (1, 3))
    assert len({rank[2].m.size for rank in three}) > 1 and all(np.array_equal(rank[1], one[0][1]) for rank in three)


def test_messages_have_a_stream_of_their_own(computing_gpu, tmp_path, monkeypatch):
    """NCCL does what one communicator is asked for in one order, the same on all ranks: that of this stream."""
    streams, exchange, add_up = [], ThreadRanks.exchange, ThreadRanks.add_up

    def noted(function):
        def call(ranks, first, second, stream):
            streams.append(stream is not here.trainer.device.main and stream is here.trainer.device.comm)
            return function(ranks, first, second, stream)

        return call

    monkeypatch.setattr(ThreadRanks, "exchange", noted(exchange))
    monkeypatch.setattr(ThreadRanks, "add_up", noted(add_up))
    settings = cuda.settle(cuda.CudaSettings(B=2, T=8, total_batch_size=32, sample_every=0, gpus=2, graph=0), "sm_90a")
    on_ranks(2, lambda ranks: train(ranks, settings, random_params(SMALL_HEADS), steps=2))
    assert streams and all(streams)


@pytest.mark.parametrize("micro_steps", (1, 2))
def test_a_step_of_two_ranks_is_captured(computing_gpu, tmp_path, monkeypatch, micro_steps):
    """As CUDA wants it: all streams of a graph are joined at its end, and wait for no event from before."""
    settings = cuda.settle(cuda.CudaSettings(B=2, T=8, total_batch_size=32 * micro_steps, gpus=2), "sm_90a")

    def work(ranks):
        here.trainer = cuda.open_trainer(FakeGPU().gpu, SMALL_HEADS, random_params(SMALL_HEADS), settings, ranks)
        here.trainer.prepare()
        assert here.trainer.graph

    on_ranks(2, work)


def test_nccl_s_errors_are_lines(monkeypatch):
    """Also those of the first messages, which connect the ranks and take memory for it; and a library that is too old.
    """
    class NcclError(Exception):
        pass

    def fail(*arguments):
        raise NcclError("unhandled cuda error")

    nccl = SimpleNamespace(NcclError=NcclError, available=True, get_unique_id=lambda: b"id", groupStart=fail, **{
        name: 0 for name in ("NCCL_INT8", "NCCL_FLOAT32", "NCCL_SUM")}, get_version=lambda: 22809, check_status=fail,
        NcclCommunicator=lambda *arguments: SimpleNamespace(allReduce=fail, allGather=fail, comm=0))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(nccl=nccl)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=nccl))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(
        **{function: lambda *arguments: 1 for function in Nccl.NOT_IN_CUPY}))
    ranks = SimpleNamespace(is_first=True, rank=0, size=2, gather=lambda value: [value, None])
    peers = Nccl(ranks)
    array, stream = SimpleNamespace(data=SimpleNamespace(ptr=0), size=0, nbytes=8), SimpleNamespace(ptr=0)
    for call in (lambda: peers.exchange([], [], stream), lambda: peers.add_up(array, array, stream),
                 lambda: peers.all_to_all(array, array, stream), lambda: peers.all_gather(array, stream),
                 lambda: peers.allocate(8)):
        with pytest.raises(cuda.UserError, match=r"NCCL cannot connect the GPUs \(unhandled cuda error\)"):
            call()
    nccl.get_version = lambda: 22707
    with pytest.raises(cuda.UserError, match=r"is 2\.27, expected 2\.28 or newer: pip install -r requirements-gpu.txt"):
        Nccl(ranks)


def test_ranks_of_different_libraries(computing_gpu, tmp_path, monkeypatch):
    """Would choose different algorithms, and have other bits."""
    settings = cuda.settle(cuda.CudaSettings(B=2, T=8, total_batch_size=32, sample_every=0, gpus=2, graph=0), "sm_90a")

    def work(ranks):
        here.trainer = cuda.open_trainer(FakeGPU().gpu, SMALL_HEADS, random_params(SMALL_HEADS), settings, ranks)
        here.trainer.matmul.identity += f" {ranks.rank}"
        here.trainer.prepare()

    with pytest.raises(cuda.UserError, match="install the same packages on all machines"):
        on_ranks(2, work)


# ----------------------------------------------------------------------------------------------------------------------
# states of several ranks


def write_states(path, ranks, table, rng, exact=True, ours=True):
    """Random states; returns m, v and float32 weights, whole."""
    shares = Shares(table, ranks, llmc=not ours)
    whole = [rng.standard_normal(shares.size).astype(np.float32) ** 2 for _ in range(2 + exact)]
    for rank in range(ranks):
        owned = Owned(shares, rank, *(shares.take(array, rank) for array in whole))
        write_optimizer_state(rank_path(path, rank), owned,
                              Progress(3, 1337, Position(0, 6), (2, 4, 0) if ours else (0, 0, 0)))
        if not ours:  # which is of version 1
            with open(rank_path(path, rank), "r+b") as f:
                f.seek(4)
                f.write(np.int32(1).tobytes())
    return whole


@pytest.mark.parametrize("table", ("small", "odd"))
@pytest.mark.parametrize("ours", (True, False))
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, table, ours):
    """Files of this project's and of llm.c's, whose shares are cut in another way."""
    rng, path = np.random.default_rng(0), str(tmp_path / "state_00000003_00000.bin")
    for wrote in (1, 2, 3, 8):
        whole = write_states(path, wrote, TABLES[table], rng, ours=ours)
        for reads in (1, 2, 5, 16):
            shares = Shares(TABLES[table], reads)
            for rank in range(reads):
                owned = Owned(shares, rank, *(np.zeros(shares.share_size(rank), np.float32) for _ in range(3)))
                progress, has_exact = read_optimizer_state(path, owned)
                assert has_exact and progress.position.sample == (6 if ours else 6 * wrote)
                for got, array in zip(owned[2:], whole):
                    assert np.array_equal(got, shares.take(array, rank))


def test_ours_of_version_1_has_other_shares(tmp_path):
    path, shares = str(tmp_path / "state_00000003_00000.bin"), Shares(TABLES["small"], 1)
    write_states(path, 2, TABLES["small"], np.random.default_rng(0))
    with open(path, "r+b") as f:
        f.seek(4)
        f.write(np.int32(1).tobytes())
    with pytest.raises(cuda.UserError, match="version 1, rank 0 of 2.*expected version 1, of several ranks of this"):
        read_optimizer_state(path, Owned(shares, 0, *np.zeros((2, shares.size), np.float32)))


def test_llm_c_s_ranks_without_zero_have_all(tmp_path):
    path, m, v = tmp_path / "state_00000003_00000.bin", *(random_params(SMALL_HEADS, seed) for seed in (1, 2))
    flat(v)[:] **= 2
    header = make_header(OPTIMIZER_MAGIC, 1, 4, 0, 0)
    header[20] = 1337
    path.write_bytes(header.tobytes() + flat(m).tobytes() + flat(v).tobytes())
    read = allocate(m.table), allocate(m.table)
    read_optimizer_state(str(path), owned_by_one(*read))
    assert np.array_equal(flat(read[0]), flat(m)) and np.array_equal(flat(read[1]), flat(v))


@pytest.mark.parametrize("damage", ("missing", "model missing", "short", "of another step", "of another rank",
                                    "of another model"))
def test_a_damaged_state_of_a_rank(tmp_path, damage):
    """Nothing is filled; where it is missing, the checkpoint before is taken."""
    settings = SimpleNamespace(output_dir=str(tmp_path), resume=1, steps=0)
    for step in (1, 2):
        model, state, marker = checkpoint_paths(str(tmp_path), step)
        write_states(state, 4, TABLES["small"], np.random.default_rng(step))
        for path in (model, marker, f"{model}.tmp", f"{rank_path(state, 1)}.tmp"):
            open(path, "w").close()
    bad = rank_path(state, 2)
    good = open(bad, "rb").read()
    if damage == "missing":
        os.unlink(bad)
        assert find_checkpoint(settings) == 1
        os.unlink(rank_path(checkpoint_paths(str(tmp_path), 1)[1], 3))
        assert not list(tmp_path.glob("*.tmp")), "what a killed run left while it saved"
    elif damage == "model missing":
        os.unlink(model)
        assert find_checkpoint(settings) == 1
        return
    else:
        header = np.frombuffer(good[:HEADER_BYTES], "<i4").copy()
        slots = {"of another step": 10, "of another rank": 3, "of another model": 44}
        header[slots.get(damage, 0)] += damage != "short"
        with open(bad, "wb") as f:
            f.write(header.tobytes() + good[HEADER_BYTES : len(good) - (damage == "short")])
        assert find_checkpoint(settings) == 2
    owned = owned_by_one(*(allocate(TABLES["small"]) for _ in range(2)))

    def resume():
        find_checkpoint(settings)
        read_optimizer_state(state, owned)

    with pytest.raises(cuda.UserError, match=os.path.basename(bad)):
        resume()
    assert not owned.m.any()


@pytest.mark.parametrize("killed_after", (0, 1, 2, 3, 4))
def test_old_checkpoints_are_deleted(tmp_path, monkeypatch, killed_after):
    """With the states of all ranks, and what a run that was killed meanwhile has left."""
    for step in (1, 2):
        model, state, marker = checkpoint_paths(str(tmp_path), step)
        for path in (model, state, rank_path(state, 1), marker):
            open(path, "w").close()
    deletions, unlink = iter(range(100)), os.unlink

    def unlink_or_die(path):
        if next(deletions) == killed_after:
            raise KeyboardInterrupt
        unlink(path)

    settings = cuda.CudaSettings(output=str(tmp_path), checkpoints_keep=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink_or_die)
        with pytest.raises(KeyboardInterrupt) if killed_after < 4 else contextlib.nullcontext():
            delete_old_checkpoints(settings, 2)
    delete_old_checkpoints(settings, 2)
    assert len(names := os.listdir(tmp_path)) == 4 and all("00000002" in name for name in names)


# ----------------------------------------------------------------------------------------------------------------------
# the program, in processes

RUN = ("-b", 2, "-t", 8, "-d", 64, "-v", 2, "-m", 7, "-s", 3, "-g", 6, "--grad_clip", 1, "--lines", "llmc",
       "--graph", 0, "-o")
MANY = ("-x", 100000, "-b", 2, "-t", 8, "-v", 0, "-s", 0, "--graph", 0, "-o", "run")


def fake_run(*flags, check=True):
    return run_program("tests/fake_gpus.py", *flags, check=check)


def start(*flags):
    return subprocess.Popen([sys.executable, ROOT / "tests" / "fake_gpus.py", *map(str, flags)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(directory):
    """What does not depend on time."""
    names = [name for name in sorted(os.listdir(directory)) if name.startswith(("main.log", "model", "DONE"))]
    return {name: (directory / name).read_bytes() for name in names}


@pytest.fixture
def heads(workplace):
    write_model("gpt2_124M.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    return workplace


def test_logs_and_models_are_equal(heads):
    """Of 1, 2 and 4 processes, all that is printed but the times; and of a run that goes on with another number."""
    printed = {}
    for size in (1, 2, 4):
        done = fake_run("--gpus", size, "-x", 5, "-n", 2, *RUN, f"run{size}")
        assert done.stderr == ""
        printed[size] = re.findall("^(val loss .*|step .*loss [0-9.]+|generating:|[0-9 ]{8,})", done.stdout,
                                   re.MULTILINE)
        assert results(heads / f"run{size}") == results(heads / "run1")
    assert len(printed[1]) > 10 and printed[1] == printed[2] == printed[4]
    fake_run("--gpus", 4, "-x", 3, *RUN, "parts")
    fake_run("--gpus", 2, "-x", 5, *RUN, "parts", "-y", 1)
    assert (heads / "parts" / "model_00000005.bin").read_bytes() == (heads / "run1" / "model_00000005.bin").read_bytes()
    logs = [(heads / directory / "main.log").read_text() for directory in ("parts", "run1")]
    assert re.findall(".* trl:.*", logs[0]) == re.findall(".* trl:.*", logs[1])


def test_what_a_checkpoint_lacks_is_said_once(heads):
    fake_run("--gpus", 2, "-n", 1, "-d", 64, *MANY, "-x", 2)
    os.unlink(heads / "run" / "state_00000002_00001.bin")
    for tokenizer in heads.rglob("*tokenizer.bin"):
        tokenizer.unlink()
    lines = fake_run("--gpus", 4, "-d", 64, *MANY, "-x", 3, "-y", 1, "--stochastic_rounding", 3).stderr.splitlines()
    assert len(lines) == 3 and "state_00000002_00001.bin: no such file" in lines[0] and lines[0].endswith("from step 1")
    assert "tokenizer.bin: no such file" in lines[1]
    assert lines[2].startswith("note: the checkpoint is of a run in bfloat16, float32 master weights, this one")


@pytest.mark.parametrize("killed", (0, 1))
def test_a_rank_that_dies(heads, killed):
    """All end at once, the last checkpoint is whole, and a run goes on from it to the same end, by other numbers."""
    process = start("--gpus", 2, "-n", 1, "-nk", 3, "-d", 64, *MANY)
    while newest_checkpoint("run") is None:
        time.sleep(0.01)
        assert process.poll() is None, process.stderr.read()
    pids = [int(pid) for pid in subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True).stdout.split()]
    time.sleep(0.1)
    os.kill(pids[killed], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (1, 137) and f"rank {killed} (" in errors and "Traceback" not in errors
    step = newest_checkpoint("run")
    for size, directory in ((1, "whole"), (2, "run")):
        resume = ("-y", 1) if directory == "run" else ()
        fake_run("--gpus", size, "-d", 64, *MANY, "-x", step + 2, "-o", directory, *resume)
    name = f"model_{step + 2:08d}.bin"
    assert (heads / "run" / name).read_bytes() == (heads / "whole" / name).read_bytes()


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_stops_all_at_one_step(heads, number):
    process = start("--gpus", 2, "-d", 32, *MANY)
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None, process.stderr.read()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    step = newest_checkpoint("run")
    assert process.returncode == 128 + number and errors.count(f"stopped after step {step}; go on with: ") == 1
    assert errors.count("finishing this step") == 1
    assert len(os.listdir("run")) == len(["model", "state", "state", "DONE", "main.log", "main.csv", "tokenizer.bin"])


@pytest.mark.parametrize("flags, words", (
    (("--gpus", 3, "-b", 2, "-t", 8, "-d", 32), ("-d/--total_batch_size 32", "B*T*GPUs = 2 * 8 * 3 = 48")),
    (("--gpus", 2, "-b", 2, "-t", 8, "-e", "none.bin"), ("none.bin",)),
    (("--gpus", 5, "-b", 2, "-t", 8), ("5 processes or more on this machine, which has 4 GPUs", "--gpus 4")),
))
def test_what_all_ranks_find_is_said_once(heads, flags, words):
    assert_one_line_error(fake_run(*flags, check=False), *words)


@pytest.mark.parametrize("name", ("model_00000002.bin", "state_00000002_00000.bin", "state_00000002_00001.bin",
                                  "DONE_00000002"))
def test_a_checkpoint_that_one_rank_cannot_write(tmp_path, name):
    """None of its files is left, on any rank; the one before stays."""
    (tmp_path / f"{name}.tmp").mkdir()
    save(tmp_path, 1)
    with pytest.raises(cuda.UserError, match=f"{name}: cannot be written"):
        save(tmp_path, 2)
    assert [path for path in os.listdir(tmp_path) if "00000002" in path] == [f"{name}.tmp"]
    assert newest_checkpoint(tmp_path) == 1


def save(directory, step, moment_of_rank_1=0.0):
    """A checkpoint of two ranks."""
    def work(ranks):
        params, shares = random_params(SMALL_HEADS), Shares(TABLES["small"], 2)
        moments = np.full((2, shares.share_size(ranks.rank)), moment_of_rank_1 if ranks.rank else 0.0, np.float32)
        save_checkpoint(str(directory), SMALL_HEADS, params, Owned(shares, ranks.rank, *moments),
                        Progress(step, 1, Position(), (2, 8, 0)), ranks=ranks)

    on_ranks(2, work)


def test_moments_of_one_rank_that_are_not_finite(tmp_path):
    with pytest.raises(cuda.UserError, match="^rank 1: after 3 steps: .*AdamW's m"):
        save(tmp_path, 3, np.nan)
    assert not os.listdir(tmp_path)


def test_a_cache_that_cannot_be_written_is_said_once(heads):
    (heads / "file").write_text("")
    flags = ("--gpus", 2, "-d", 32, *MANY, "-x", 1)
    done = run_program("tests/fake_gpus.py", *flags, TRAIN_GPT2_CACHE=str(heads / "file" / "cache"))
    assert len(re.findall("warning: .*file/cache: cannot be written", done.stderr)) == 1


@pytest.mark.parametrize("bus, kind, may_share, words", (
    (1, "sm_90a", "0", "ranks 0 and 1 have the same GPU"), (1, "sm_90a", "1", None), (2, "sm_90a", "0", None),
    (2, "sm_80", "1", "expected GPUs of one kind")))
def test_gpus_of_ranks(fake_gpu, monkeypatch, bus, kind, may_share, words):
    def gather(value):
        return [value, [value[0], bus, list(fake_gpu.gpu._replace(arch=kind))] if len(value) == 3 else value]

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", may_share)
    fake_gpu.cp.cuda.Device = lambda: SimpleNamespace(pci_bus_id=1)
    with pytest.raises(cuda.UserError, match=words) if words else contextlib.nullcontext():
        check_alike(SimpleNamespace(size=2, gather=gather), fake_gpu.gpu, cuda.CudaSettings())


@pytest.mark.parametrize("what", ("model", "training data", "validation data", "HellaSwag"))
def test_files_of_ranks(workplace, what):
    ranks = SimpleNamespace(size=2, gather=lambda read: [read, {**read, what: ["another", 0]}])
    example = Example(np.arange(2), [np.arange(3)] * 4, 0)
    with pytest.raises(cuda.UserError, match=f"rank 1 has another {what} than rank 0"):
        check_same_files(ranks, SMALL_HEADS, random_params(SMALL_HEADS),
                         *open_data(cuda.CudaSettings(B=2, T=8), SMALL_HEADS.V), [example])


# ----------------------------------------------------------------------------------------------------------------------
# speed


@pytest.fixture
def small_runs(monkeypatch, tmp_path):
    """dev/bench.py scale with a small model, on fake GPUs."""
    model, write = str(tmp_path / "model.bin"), bench.write_tokens
    write_model(model, SMALL_HEADS, random_params(SMALL_HEADS))
    for name, value in dict(
            PROGRAM=str(ROOT / "tests" / "fake_gpus.py"), T=8, V=SMALL_HEADS.V, count_gpus=lambda: 4,
            write_tokens=lambda path, tokens, count, format: write(path, [tokens[0][:5000]], 5000, format),
            RUNS={"small": ("small, B=2", ("-e", model, "-b", 2, "-x", 3, "--graph", 0))},
            SAME=("-e", model, "-b", 2, "-d", 32, "-v", 1, "-m", 2, "--graph", 0)).items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.chdir(tmp_path)


def test_scaling_is_measured(small_runs, run_here):
    lines = run_here(bench, "scale", "--gpus", 1, 2, "--only", "small", "--same", 2).stdout.splitlines()
    # A fake step takes 1 ms.
    assert re.fullmatch(r"\| small, B=2 \| 1 \| 1\.00 \| 16,000 \| 100\.0% \| \d\.\d \|", lines[2])
    assert re.fullmatch(r"\| small, B=2 \| 2 \| 1\.00 \| 32,000 \| 100\.0% \| \d\.\d \|", lines[3])
    assert lines[4] == "logs of 2 updates on 1, 2 GPUs: equal"


def test_a_run_that_fails_is_named(small_runs, run_here):
    assert_one_line_error(run_here(bench, "scale", "--gpus", 8, check=False), "--gpus 8: this machine has 4")
    bench.RUNS["small"] = "small", ("-e", "none.bin", "-b", 2)
    done = run_here(bench, "scale", "--gpus", 1, "--only", "small", check=False)
    assert_one_line_error(done, "-e none.bin", "none.bin: no such file")


def test_the_script_for_eight_gpus_runs(tmp_path):
    """Its flags are those of the two programs."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script = (ROOT / "scripts" / "scale_8.sh").read_text().replace("$PWD/.venv/bin", str(tmp_path))
    script = script.replace('cd "$(dirname "$0")/.."\n', "")
    lines = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    (program, *flags), (other, *its_flags) = map(shlex.split, lines)
    assert (program, other) == ("dev/bench.py", "dev/timeline.py")
    assert max(bench.parse_arguments(flags).gpus) == 8
    assert parse_settings(cuda.CudaSettings, "", its_flags).gpus == 8


def test_a_timeline(heads, fake_gpu, run_here, monkeypatch):
    """Of a step of two micro-batches: what runs on each stream, and a picture."""
    monkeypatch.setattr(timeline, "cp", fake_gpu.cp)
    for graph in (0, 1):
        lines = run_here(timeline, "-b", 2, "-t", 8, "-d", 32, "--graph", graph).stdout.splitlines()
        table = lines[lines.index(next(line for line in lines if line.split() == ["begin", "end", "ms"])) + 1 :]
        names = [re.match(r"(\w+ \w+) +1\.000 +1\.000 +0\.000$", line)[1].strip() for line in table]
        assert sorted(names) == sorted(["forward 0", "forward 1", "backward 0", "backward 1", "add 0", "adamw all"])
        assert (heads / "timeline.png").stat().st_size > 5000


@pytest.mark.parametrize("first, second, words", (
    ("-b 4", "", "-b/--batch_size: rank 1 has 2, rank 0 4"),
    ("-l 0.5", "", "-l/--learning_rate: rank 1 has 0.0001, rank 0 0.5"),
    ("-o run", "", "-o/--output: rank 1 has no directory, rank 0 a direct"),
    ("-o one", "-o two", "-o one: rank 1 does not see there what rank 0 writes"),
    ("-e other.bin", "", "rank 1 has another model than rank 0, or other"),
    ("--gpus 4", "", "--gpus 4: a launcher has started 2 on this machine")))
def test_flags_of_ranks_are_compared(heads, free_port, first, second, words):
    """Of those that somebody starts by hand; and what is in their files."""
    write_model("other.bin", SMALL_HEADS, random_params(SMALL_HEADS, seed=9))
    place = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port),
                 TORCHELASTIC_RUN_ID=uuid.uuid4().hex)
    flags = ("-b", "2", "-t", "8", "-d", "64", "-v", "0", "-s", "0", "-x", "1")
    ranks = [subprocess.Popen([sys.executable, ROOT / "tests" / "fake_gpus.py", *flags, *more.split()],
                              env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) for rank, more in enumerate((first, second))]
    ends = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1] and words in ends[0][1] and ends[1][1] == ""
