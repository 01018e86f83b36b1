"""Several GPUs, on none: ranks, processes under each launcher's variables, and each way to fail;
shares of the parameters; processes that train on fake_gpus, whose update kernels compute."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import fake_gpus
import train_gpt2
import train_speedrun
from conftest import SMALL_HEADS, optimizer_of, random_params, remove_after
from fake_gpu import Array
from fake_gpus import cuda, end_ranks, fork_ranks, wait_for
from llmc.checkpoint import Progress, owned_by_one, rank_path, read_optimizer_state, write_optimizer_state
from llmc.files import OPTIMIZER_MAGIC, make_header
from llmc.errors import UserError
from llmc.gpu.launcher import translate_launcher
from llmc.gpu.trainer import NOT_READY, Trainer
from llmc.resume import newest_checkpoint
from llmc.shuffle import Position
from llmc.single_process import LAUNCHERS
from llmc.tensors import Row, allocate, flat
from llmc.gpu.several.ranks import LOST, Ranks
from llmc.gpu.several.nccl import Nccl
from llmc.gpu.several.zero import matrix_parts
from llmc.gpu.saver import OwnedShare
from llmc.gpu.shares import CUTS, UPDATE_CHUNK, Shares
from train_speedrun_cuda import Muon

# --------------------------------------------------------------------------------------------------
# ranks

BATCH_SCRIPT = dict(SLURM_PROCID="0", SLURM_NTASKS="4", SLURM_LOCALID="0", SLURM_JOB_ID="17")
STEP = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}


def fail():
    """argv: what fails, and on which ranks."""
    with Ranks(os.environ) as ranks:
        print("a warning that all have", file=sys.stderr)
        who = eval(sys.argv[2])
        if sys.argv[1] == "error":
            if ranks.rank in who:
                raise UserError("disk full")
            while ranks.is_first:  # waits for its GPU
                ranks.check()
                time.sleep(0.01)
        ranks.gather(1 / (ranks.rank not in who))


@pytest.mark.parametrize("environ, expected", (
    ({}, None), ({"RANK": "1"}, None), ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    (BATCH_SCRIPT, None), ({**STEP, "SLURM_STEP_ID": "4294967290"}, None),
    ({**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, ["3", "4", "1", "127.0.0.1", "29517"]),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[07-8,11],x"},
     ["0", "2", "0", "n07", "29517"]),
    # srun --mpi=pmi2
    ({**STEP, "PMI_RANK": "0", "PMI_SIZE": "9"}, ["0", "4", "0", "127.0.0.1", "29517"]),
    ({**BATCH_SCRIPT, **MPICH, "MASTER_ADDR": "box"}, ["1", "2", "1", "box", "29517"])))
def test_launchers(environ, expected):
    environ = dict(environ)
    assert translate_launcher(environ) == (expected is not None)
    assert not expected or [environ[name]
                            for name in (*LAUNCHERS[0], "MASTER_ADDR", "MASTER_PORT")] == expected


@pytest.mark.parametrize("bus, changes, may_share, words", (
    (1, {}, "0", "ranks 0 and 1 have the same GPU"), (1, {}, "1", None),
    (2, dict(data="another"), "0", None),
    (2, dict(B=2), "0", "-b/--batch_size: rank 1 has 2, rank 0 4"),
    (2, dict(seed=9), "0", "rank 1 has 9, rank 0 42"),
    (2, dict(weights=9), "0", "model: rank 1 has"),
    (2, dict(kind="sm_80"), "0", "GPU: rank 1 has")))
def test_ranks_are_alike(fake_gpu, monkeypatch, bus, changes, may_share, words):
    def check(rank, bus, weights=0, kind="sm_90a", **changes):
        monkeypatch.setattr(fake_gpu.cp.cuda, "Device",
                            lambda: SimpleNamespace(pci_bus_id=bus), raising=False)
        ranks = SimpleNamespace(size=2, rank=rank, gather=lambda mine: found.append(mine) or found)
        Ranks.check_alike(ranks, fake_gpu.gpu._replace(arch=kind), cuda.CudaSettings(**changes),
                          SMALL_HEADS, random_params(SMALL_HEADS, weights))

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", may_share)
    found = []
    check(0, 1)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check(1, bus, **changes)


@pytest.mark.parametrize("what, who, expected", (
    ("error", [2], "rank 2: fail: error: disk full\n"),
    ("error", [0, 1, 2], "fail: error: disk full\n"),
    ("fault", [1], r"rank 1: fail: Traceback.*\n(rank 1: .*\n)+rank 1: ZeroDivisionError: .*\n")))
def test_an_error_ends_all_with_one_line(here, what, who, expected):
    statuses, _, err = end_ranks(fork_ranks(fail, 3, flags=(what, who)))
    assert statuses == [1, 1, 1] and re.fullmatch(f"a warning that all have\n{expected}", err)


# --------------------------------------------------------------------------------------------------
# shares, and runs

ODD = {"a": Row((7,)), "b": Row((3, 5, 11), stacked=True, decays=True),
       "c": Row((3, 1), stacked=True)}
TABLES = {"small": train_gpt2.parameter_table(SMALL_HEADS), "odd": ODD}


@pytest.mark.parametrize("table", TABLES)
def test_every_element_has_one_owner(table):
    """And is in one chunk of its owner's, with a place in the share's buffers, and one for each
    rank's gradient among those that arrive, on all ranks from the same place on. 2, 4, 8 and 16
    ranks have the chunks of one."""
    alone = Shares(TABLES[table], 1, 0.1).chunks(0)[0]
    fields = ["flat", "count", "index", "decay", "at_random"]
    for ranks in (1, 2, 3, 8, 11, 16):
        shares = Shares(TABLES[table], ranks, 0.1)
        owners = np.zeros(shares.size, np.int8)
        indices = []
        total = None
        arrives = {}
        for rank in range(ranks):
            chunks, _, total = shares.chunks(rank)
            local, found = np.full((2, shares.size), -1)
            for part in shares.parts_of(rank):
                local[part.begin : part.begin + part.size] = part.local + np.arange(part.size)
                owners[part.begin : part.begin + part.size] += 1
                assert arrives.setdefault(part.segment, part.received) == part.received
            assert sorted(local[local >= 0]) == list(range(shares.share_size(rank)))
            for chunk in chunks:
                assert 0 < chunk["count"] <= UPDATE_CHUNK
                found[chunk["flat"] : chunk["flat"]
                      + chunk["count"]] = (chunk["local"] + np.arange(chunk["count"]))
            assert np.array_equal(found, local)
            places = np.concatenate([chunks["received"] + r * chunks["stride"].astype(int)
                                     for r in range(ranks)])
            order = np.argsort(places)
            stops = places + np.tile(chunks["count"], ranks)
            assert ((stops[order][:-1] <= places[order][1:]).all()
                    and stops.max(initial=0) <= shares.received_size())
            assert shares.share_size(rank) <= shares.share_size(ranks - 1)
            indices += chunks["index"].tolist()
        assert (owners == 1).all() and sorted(indices) == list(range(total))
        if CUTS % ranks == 0:
            same = np.sort(np.concatenate([shares.chunks(rank)[0] for rank in range(ranks)]),
                           order="flat")
            assert same[fields].tolist() == np.sort(alone, order="flat")[fields].tolist()


@pytest.mark.parametrize("name, l, rate, decay, decays", (
    ("wte", None, 28.0, 0.01, True), ("fcb", 1, 0.6, 0.01, False), ("qkvw", 1, 1.0, 0.5, True)))
def test_rates_and_weight_decay_reach_the_gpu(name, l, rate, decay, decays):
    """Those of a speed run's table, with a weight decay of 0.5: of all tensors, or of matrices."""
    table = train_speedrun.parameter_table(train_speedrun.Config(64, 257, 3, 3, 96, 384))
    begin = sum(row.size for row in list(table.values())[: list(table).index(name)])
    begin += table[name].size // 3 * (l or 0)
    for decay_all in (True, False):
        chunks = Shares(table, 2, 0.5, decay_all).chunks(0)[0]
        others = Shares(table, 2, 0.5, decay_all).chunks(1)[0]
        chunks = np.sort(np.concatenate([chunks, others]), order="flat")
        chunk = chunks[np.searchsorted(chunks["flat"], begin, side="right") - 1]
        assert chunk["rate"] == np.float32(rate)
        assert chunk["decay"] == np.float32(decay if decay_all or decays else 0.0)


def test_nccl_s_errors_are_lines(fake_gpu, monkeypatch):
    """Also those of the first messages, which connect the ranks; and a library that is too old."""
    fail = Mock(side_effect=ArithmeticError("unhandled cuda error"))
    communicator = Mock(allReduce=fail, allGather=fail, check_async_error=fail)
    nccl = Mock(NcclError=ArithmeticError,
                get_version=lambda: 22809, get_unique_id=lambda: b"id", groupStart=fail,
                check_status=fail, NcclCommunicator=lambda *arguments: communicator)
    for name, module in (("cupy", Mock()), ("cupy.cuda", Mock(nccl=nccl))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ctypes, "CDLL", Mock())
    ranks = SimpleNamespace(is_first=True, rank=0, size=2, gather=lambda value: [value, None])
    nccl_here = Nccl(ranks, 64)
    array = np.zeros(2, np.int32).view(Array)
    stream = SimpleNamespace(ptr=0)
    for call in (lambda: nccl_here.exchange([], [],
                                            stream), lambda: nccl_here.add_up(array, array, stream),
                 lambda: nccl_here.all_to_all(array, array,
                                              stream), lambda: nccl_here.all_gather(array, stream),
                 lambda: nccl_here.allocate(8)):
        pytest.raises(UserError,
                      call).match(r"NCCL cannot connect the GPUs \(unhandled cuda error\)")
    wait = SimpleNamespace(nccl=nccl_here), SimpleNamespace(ptr=0, synchronize=lambda: None)
    Trainer.wait(*wait)
    fake_gpu.cp.cuda.runtime.eventQuery = lambda ptr: NOT_READY
    pytest.raises(UserError, Trainer.wait,
                  *wait).match(r"NCCL lost another GPU \(unhandled cuda error\)")
    nccl.get_version = lambda: 22707
    pytest.raises(UserError, Nccl, ranks,
                  64).match(r"is 2\.27, expected 2\.28 or newer: pip install -r requirements")


def empty_share(shares, rank=0):
    m, v, exact = np.zeros((3, shares.share_size(rank)), np.float32)
    return OwnedShare(shares.table, {"m": m, "v": v}, exact, shares, rank)


def write_states(path, ranks, table, rng, ours=True):
    """Random states; returns m, v and float32 weights, whole."""
    shares = Shares(table, ranks, llmc=not ours)
    whole = [rng.standard_normal(shares.size).astype(np.float32) ** 2 for _ in range(3)]
    for rank in range(ranks):
        m, v, exact = (shares.take(array, rank) for array in whole)
        owned = OwnedShare(table, {"m": m, "v": v}, exact, shares, rank)
        progress = Progress(3, 1337, Position(0, 6), (2, 4, 0) if ours else (0, 0, 0))
        write_optimizer_state(rank_path(path, rank), owned, progress)
        if not ours:
            header = np.memmap(rank_path(path, rank), "<i4", "r+", shape=256)
            header[[1, 45]] = 1, 0  # version 1, without a CRC-32
    return whole


@pytest.mark.parametrize("table", ("small", "odd"))
@pytest.mark.parametrize("ours", (True, False))
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, table, ours):
    """Files of this project's and of llm.c's, whose shares are cut in another way, as were ours in
    version 1."""
    rng = np.random.default_rng(0)
    path = str(tmp_path / "state_00000003_00000.bin")
    for wrote in (1, 2, 3, 8):
        whole = write_states(path, wrote, TABLES[table], rng, ours=ours)
        for reads in (1, 2, 5, 16):
            shares = Shares(TABLES[table], reads)
            for rank in range(reads):
                owned = empty_share(shares, rank)
                progress, has_exact = read_optimizer_state(path, owned)
                assert has_exact and progress.position.sample == (6 if ours else 6 * wrote)
                for got, array in zip((*owned.state.values(), owned.exact), whole):
                    assert np.array_equal(got, shares.take(array, rank))
    if ours:
        np.memmap(path, "<i4", "r+", shape=2)[1] = 1
        pytest.raises(UserError, read_optimizer_state, path, owned).match(
            "version 1, rank 0 of 8.*expected version 1, of several ranks of this")


@pytest.mark.parametrize("ranks, exact", ((4, 0), (1, 1)))
def test_llm_c_s_ranks_without_zero_have_all(tmp_path, ranks, exact):
    path = tmp_path / "state.bin"
    parts = [random_params(SMALL_HEADS, seed) for seed in range(2 + exact)]
    flat(parts[1])[:] **= 2
    header = make_header(OPTIMIZER_MAGIC, 1, ranks, 0, exact)
    header[20] = 1337
    path.write_bytes(header.tobytes() + b"".join(flat(part).tobytes() for part in parts))
    read = [allocate(parts[0].table) for _ in parts]
    assert (read_optimizer_state(str(path), owned_by_one(optimizer_of(*read[:2]), *read[2:]))[1]
            == exact)
    assert all(np.array_equal(flat(got), flat(part)) for got, part in zip(read, parts))


# or a slot of the header: step, rank, model; the sampler's state, which the CRC-32 alone tells
@pytest.mark.parametrize("damage", ("missing", "short", 10, 3, 44, 20))
def test_a_damaged_state_of_a_rank(tmp_path, damage):
    """Nothing is filled."""
    state = str(tmp_path / "state_00000002_00000.bin")
    write_states(state, 4, TABLES["small"], np.random.default_rng(2))
    bad = Path(rank_path(state, 2))
    owned = empty_share(Shares(TABLES["small"], 1))
    if damage == "missing":
        bad.unlink()
    elif damage == "short":
        os.truncate(bad, bad.stat().st_size - 1)
    else:
        np.memmap(bad, "<i4", "r+", shape=256)[damage] += 1
    pytest.raises(UserError, read_optimizer_state, state, owned).match(bad.name)
    assert not owned.state["m"].any()


RUN = ("-b", 2, "-t", 8, "-d", 64, "-v", 2, "-m", 7, "-s", 3, "-g", 6, "--grad_clip", 1, "--lines",
       "llmc",
       "--graph", 0, "-o")
EPOCHS = ("-b", 4, "-t", 64, "-d", 1024, "--shuffle", 1)  # the first one ends within an update
MANY = ("-x", 100000, "-b", 2, "-t", 8, "-d", 64, "-v", 0, "-s", 0, "-n", 1, "-nk", 3, "--graph", 0,
        "-o", "run")


@pytest.fixture
def start(heads):
    """start(ranks, flag, ...): processes of train_gpt2_cuda.py."""
    return lambda size, *flags: fork_ranks(fake_gpus.main, size, flags=flags)


def results(directory):
    """What does not depend on time: logs and models; and whole moments and float32 weights of all
    ranks."""
    files = [path.read_bytes() for path in sorted(directory.iterdir())
             if path.name.startswith(("main.log", "model"))]
    owned = empty_share(Shares(TABLES["small"], 1))
    read_optimizer_state(str(directory / "state_00000005_00000.bin"), owned)
    return files, [array.tobytes() for array in (*owned.state.values(), owned.exact)]


@pytest.mark.parametrize("sizes, first, second, flags",
                         (((1, 2), 1, 2, ("--dtype", "bfloat16", "--grad_clip", 1)),
    ((1, 2, 4), 4, 2, ("--dtype", "float32", "--grad_clip", 0.5, "-c", 0.1, *EPOCHS)),
    ((1, 3), 3, 1, ("--dtype", "bfloat16", "--grad_clip", 0, "-d", 48)),  # 3 divides no tensor
    ((1, 2), 2, 1, ("--dtype", "bfloat16", "--float32_grads", 1, "-w", 0))), ids=str)
def test_the_same_bits_on_any_number_of_gpus(workplace, start, sizes, first, second, flags):
    """All that is printed but the times, and all that is saved; also beyond another number's
    checkpoint."""
    printed = {}
    found = {}
    for size in sizes:
        statuses, out, err = end_ranks(start(size, "-x", 5, "-n", 3, *RUN, f"run{size}", *flags))
        assert statuses == [0] * size and err == "" and "nan" not in out
        printed[size] = re.findall("^(val loss .*|step .*loss [0-9.]+|generating:|[0-9 ]{8,})", out,
                                   re.MULTILINE)
        found[size] = results(workplace / f"run{size}")
        assert printed[size] == printed[1] and found[size] == found[1] and len(printed[1]) > 10
    remove_after(f"run{first}", 3)
    assert (end_ranks(start(second, "-x", 5, *RUN, f"run{first}", *flags, "-y", 1))[0] == [0]
            * second)
    (_, *models), state = results(workplace / f"run{first}")
    assert models == found[1][0][1:] and state == found[1][1]


def test_a_small_text_limits_the_steps_of_random_weights(workplace, start):
    """As on one GPU, to ten epochs, unless -x is given."""
    statuses, out, _ = end_ranks(start(2, "-e", "d2", "-b", 16, "-t", 64, "-d", 2048, "-v", 0, "-s",
                                       0, "--graph", 0))
    assert statuses == [0, 0] and "run       10 steps of 2048 tokens" in out


@pytest.mark.parametrize("names, tokens", zip(LAUNCHERS[:4], (32, 64, 32, 64)), ids=(
    "torchrun", "Open MPI", "MPICH", "Slurm"))
def test_a_step_of_two_ranks_is_captured(heads, names, tokens):
    """Under each launcher. As CUDA wants it: all streams of a graph are joined at its end, and wait
    for no event from before."""
    flags = (*MANY, "-x", 1, "-o", "", "-n", 0, "-d", tokens, "--graph", 1)
    ranks = fork_ranks(fake_gpus.main, 2, flags=flags, names=names, SLURM_STEP_ID="0")
    assert end_ranks(ranks)[::2] == ([0, 0], "")


def die_after_step_2():
    """The program, whose rank 0 is killed as soon as the checkpoint of step 2 is complete."""
    def replace(source, target):
        real(source, target)
        if target.endswith("DONE_00000002"):
            os.kill(os.getpid(), signal.SIGKILL)

    real = os.replace
    os.replace = replace
    fake_gpus.main()


def test_a_rank_that_dies(workplace, start):
    """All end at once; from the last checkpoint, a run goes on to the same end, and keeps three, of
    all ranks."""
    statuses, _, err = end_ranks(fork_ranks(die_after_step_2, 2, flags=MANY))
    assert statuses == [-9, 1] and "Traceback" not in err
    for size, *flags in ((1, "-o", "whole"), (2, "-y", 1)):
        statuses, _, err = end_ranks(start(size, *MANY, "-x", 4, *flags))
        assert statuses == [0] * size, err
    whole, parts = ((workplace / name / "model_00000004.bin").read_bytes()
                    for name in ("whole", "run"))
    assert whole == parts and {path.name for path in workplace.glob("run/state*")} == {
        f"state_{step:08d}_{rank:05d}.bin" for step in (2, 3, 4) for rank in (0, 1)}


@pytest.mark.parametrize("number, to, statuses, expected", (
    (signal.SIGINT, (0, 1), [130, 130], "finishing this step; Ctrl-C once more"),
    (signal.SIGTERM, (1,), [143, 143], "stopped after step"),
    (signal.SIGKILL, (1,), [1, -9], f": error: {LOST}\n"),
    (None, (), [1, 1], "train.bin: no such file")))
def test_a_signal_or_lost_data_stops_all_at_one_step(start, number, to, statuses, expected):
    ranks = start(2, *MANY, "-n", 0)
    wait_for("\nstep", ranks)
    if number is None:
        os.unlink("data/tiny_shakespeare_train.bin")
    for rank in to:
        os.kill(ranks[rank].pid, number)
    found, _, err = end_ranks(ranks)
    assert found == statuses and err.count(expected) == 1 and "Traceback" not in err
    if number != signal.SIGKILL:  # a checkpoint of both ranks
        assert err.count(f"stopped after step {newest_checkpoint('run')};") == (number is not None)
        assert (len(os.listdir("run"))
                == len(["model", "state", "state", "DONE", "main.log", "main.csv", "tokenizer"]))


@pytest.mark.large
def test_gpus_and_ctrl_c(heads):
    """The program starts its ranks, which stop at one step."""
    process = subprocess.Popen([sys.executable, fake_gpus.__file__, "--gpus", "2", *map(str, MANY),
                                "-n", "0"],
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert any(line.startswith("step") for line in process.stdout), process.communicate()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)  # on a busy machine, a minute is little
    assert process.returncode == 130 and err.startswith("\nfinishing this step; Ctrl-C once more"
                                                        " to stop at once\n")
    assert (err.count(f"stopped after step {newest_checkpoint('run')};") == 1
            and err.count("\n") == 3)


@pytest.mark.parametrize("size, flags, words", (
    (3, ("-b", 2, "-t", 8, "-d", 32),
     "-d/--total_batch_size 32: expected a multiple of B*T*GPUs = 48"),
    (2, ("-b", 2, "-t", 8, "-e", "none.bin"), "none.bin: no such file"),
    (2, ("--gpus", 4), "--gpus 4: a launcher has started 2 ranks"),
    (5, ("-b", 2, "-t", 8), "5 or more processes on this machine, which has 4 GPUs")))
def test_an_error_is_one_line(start, size, flags, words):
    statuses, _, err = end_ranks(start(size, *flags))
    assert statuses == [1] * size and words in err and err.count("\n") == 1


def test_a_checkpoint_that_one_rank_cannot_write(workplace, start, name="state_00000002_00001.bin"):
    """None of its files is left, on any rank; the one before stays."""
    (workplace / "run" / f"{name}.tmp").mkdir(parents=True)
    statuses, _, err = end_ranks(start(2, *MANY))
    assert (statuses == [1, 1] and f"rank 1: run/{name}: cannot be written" in err
            and err.count("\n") == 1)
    assert [path for path in os.listdir("run") if "00000002" in path] == [f"{name}.tmp"]
    assert newest_checkpoint("run") == 1


@pytest.mark.parametrize("ranks", (1, 3, 4, pytest.param(16, marks=pytest.mark.large)))
def test_matrices_travel_to_one_rank_each_and_back(ranks):
    """Of a stack: what arrives, in the order in which it was sent, is whole matrices."""
    shares = Shares(train_speedrun.parameter_table(train_speedrun.Config(64, 257, 3, 3, 96, 384)),
                    ranks)
    flat_buffer = np.random.default_rng(0).standard_normal(shares.size)
    for stack in Muon.stacks(shares.table):
        parts = [matrix_parts(shares, stack, rank) for rank in range(ranks)]
        local = [np.concatenate([flat_buffer[part.begin : part.begin + part.size]
                                 for part in stack.parts_of(shares, rank)])
                 for rank in range(ranks)]
        whole = []
        for owner, (_, here) in enumerate(parts):
            messages = {source: [local[source][part] for to, part in there if to == owner]
                        for source, (there, _) in enumerate(parts)}
            arrived = np.full(sum(part.stop - part.start for _, part in here), np.nan)
            for source, part in here:
                arrived[part] = messages[source].pop(0)
            assert not any(messages.values()) and arrived.size % stack.size == 0
            whole.append(arrived)
        assert max(map(len, whole)) == -(-stack.count // ranks) * stack.size
        assert np.array_equal(np.concatenate(whole),
                              flat_buffer[stack.begin :][: stack.count * stack.size])
