"""The ranks of a run, with no GPU: real processes under each launcher's variables, how they meet, and each way to fail.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from conftest import ROOT
from llmc.errors import UserError
from llmc.gpu.launchers import find_launch, first_host, meeting_place
from llmc.gpu.ranks import HEADER, LIMIT, MAGIC, Peer, join, receive_frame, send_frame

BEGIN = """
    import json, os, signal, sys, time
    from llmc.errors import Interrupted, Interruption, UserError, run_main
    import llmc.gpu.ranks
    from llmc.gpu.launchers import start_ranks
    from llmc.gpu.ranks import join

    llmc.gpu.ranks.ANSWER_SECONDS, llmc.gpu.ranks.GRACE_SECONDS = 0.5, 0.7
    llmc.gpu.ranks.FIRST_NOTE_SECONDS = float(os.environ.get("NOTE", 5))
    llmc.gpu.launchers.FOLLOW_SECONDS = 0.5

    def say(text):
        os.write(1 if ranks.is_first else 2, (text + "\\n").encode())

    def main():
        global ranks
        with join(seconds=float(os.environ.get("SECONDS", 20))) as ranks:
"""
END = """
    run_main(main)
"""
HAND = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
MPICH, SLURM = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
VARIABLES = re.compile("(RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI|MPI_|SLURM_|TORCHELASTIC_|RUN_ID)")


class Run:
    """Processes of one program, a rank each."""

    def __init__(self, path, port):
        self.path, self.port, self.processes = path, port, []

    def start(self, rank, size, names=HAND, **variables):
        environ = {name: value for name, value in os.environ.items() if not VARIABLES.match(name)}
        environ |= dict(zip(names, map(str, (rank, size, rank)))) | {"MASTER_PORT": str(self.port)} | variables
        process = subprocess.Popen([sys.executable, self.path], env={**environ, "PYTHONPATH": str(ROOT)}, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.processes.append(process)
        return process

    def start_all(self, size, *arguments, **variables):
        for rank in range(size):
            self.start(rank, size, *arguments, **variables)
        return self

    def end(self, timeout=20):
        """[(exit status, stdout, stderr)] of each."""
        return [(process.returncode, out, err) for process in self.processes
                for out, err in [process.communicate(timeout=timeout)]]

    def errors(self):
        """What all of them wrote on stderr, lines."""
        return "".join(err for _, _, err in self.end()).splitlines()


@pytest.fixture
def program(tmp_path, free_port):
    """program(body): a Run of `with join() as ranks: body`, whose processes are gone when the test ends."""
    runs = []

    def make(body, port=free_port):
        path = tmp_path / f"run{len(runs)}.py"
        path.write_text(textwrap.dedent(BEGIN) + textwrap.indent(textwrap.dedent(body), 8 * " ") + textwrap.dedent(END))
        runs.append(Run(path, port))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.processes:
            process.kill()
            process.communicate()


def lines_of(process, count):
    """The first lines that a process writes to stdout."""
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


# ----------------------------------------------------------------------------------------------------------------------
# who is who


@pytest.mark.parametrize("names", (HAND, OPEN_MPI, MPICH, SLURM), ids=("torchrun", "Open MPI", "MPICH", "Slurm"))
@pytest.mark.parametrize("size", (1, 2, 4))
def test_gather(program, names, size):
    """Values come back on all ranks, in order, floats to the bit; rank 0 alone prints."""
    numbers = [0.1, 1e-320, -0.0, 1 / 3, float("inf")]
    run = program(f"""
        values = ranks.gather([ranks.rank, ranks.local_rank, "\u00f8", None, {numbers[:-1]} + [float("inf")]])
        largest = [ranks.largest(None), ranks.largest(ranks.rank), ranks.largest(None if ranks.rank else 0)]
        print(json.dumps([values, *largest]))
        sys.stderr.write(f"on stderr:")
        sys.stderr.write(f" {{ranks.size}}\\n\\nmore\\n")
    """)
    variables = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "17"} if names is SLURM else {}
    for rank, (status, out, err) in enumerate(run.start_all(size, names, **variables).end()):
        assert status == 0, err
        if rank == 0:
            values, *most = json.loads(out)
            assert values == [[r, r, "\u00f8", None, numbers] for r in range(size)]
            assert struct.pack("5d", *values[0][4]) == struct.pack("5d", *numbers)
            assert most == [None, size - 1, 0]
        prefix = f"rank {rank}: " if rank else ""
        assert err == f"{prefix}on stderr: {size}\n{prefix}\n{prefix}more\n" and (out == "" or rank == 0)


def test_local_ranks_by_host(program):
    """Where no variable tells it, the local rank is the place among the ranks of this machine."""
    run = program("print(ranks.gather([ranks.local_rank, ranks.local_size]))").start_all(3, MPICH[:2])
    assert run.end()[0][1] == "[[0, 3], [1, 3], [2, 3]]\n"


def test_alone():
    with join({}) as ranks:
        assert (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.is_first) == (0, 1, 0, 1, True)
        assert ranks.gather("x") == ["x"] and ranks.largest(None) is None and ranks.largest(2) == 2
        checks = []
        assert ranks.starmap(abs, [(-1,), (2,)], check=lambda: checks.append(1)) == [1, 2] and len(checks) == 2


BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "17"}


@pytest.mark.parametrize("environ, expected", (
    ({}, (0, 1, None)),
    (BATCH_SCRIPT, (0, 1, None)),
    ({**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291"}, (0, 1, None)),  # as some versions number it
    ({**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, (3, 4, 1)),
    ({**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (0, 2, 0)),
    ({**BATCH_SCRIPT, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, (5, 6, None)),
    ({**BATCH_SCRIPT, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, (1, 2, 1)),
    ({**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, (1, 2, 1)),
    ({**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMI_SIZE": "4"}, (0, 4, 0)),  # srun --mpi=pmi2
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "0", "WORLD_SIZE": "3"}, (0, 3, None)),
))
def test_launchers(environ, expected):
    assert find_launch(environ)[:3] == expected


@pytest.mark.parametrize("environ, words", (
    ({"RANK": "1"}, "RANK=1, and WORLD_SIZE is not set"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: expected less than WORLD_SIZE=2"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected a number from 1"),
    ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE="),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "a"}, "LOCAL_RANK=a"),
    ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "80000"}, "MASTER_PORT=80000"),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR"),
))
def test_bad_variables(environ, words):
    with pytest.raises(UserError) as error:
        meeting_place(find_launch(environ), environ)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_meeting_place():
    def place(**variables):
        environ = {"RANK": "0", "WORLD_SIZE": "4", **variables}
        return meeting_place(find_launch(environ), environ)

    def step(**variables):
        environ = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", **variables}
        return meeting_place(find_launch(environ), environ)

    assert place()[:2] == ("127.0.0.1", tuple(range(29500, 29516)))
    assert place(MASTER_ADDR="box", MASTER_PORT="40000")[:2] == ("box", tuple(range(40000, 40016)))
    store = place(MASTER_PORT="40000", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="none")
    assert store.ports[0] == 40016  # on 40000 torchrun listens, on those that follow it the ranks of another run
    assert place(MASTER_PORT="65535").ports[:2] == (65535, 1024)
    assert step().host == "127.0.0.1"
    two = dict(SLURM_STEP_NUM_NODES="2", SLURM_STEP_NODELIST="gpu[07-08]")
    assert step(**two).host == "gpu07" and step(**two, MASTER_ADDR="box").host == "box"
    places = [step(), step(SLURM_STEP_ID="1"), step(SLURM_JOB_ID="18")]
    assert len({place.run for place in places}) == 3 and len({place.ports for place in places}) == 3


@pytest.mark.parametrize("nodelist, host", (
    ("node[01-04,7],x", "node01"), ("x,node[01-04]", "x"), ("a", "a"), ("a-b[3],c", "a-b3"), ("n[9,11-12]-ib", "n9-ib"),
    ("rack[1-2]n[03-04],x", "rack1n03"), ("gpu-a-2-[10-11]", "gpu-a-2-10"), ("a.b.c,d", "a.b.c"),
))
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_first_host_of_any_list():
    """Lists are made from hosts in a form that Slurm prints; the first host comes back."""
    rng = random.Random(5)
    for _ in range(500):
        prefix, suffix = rng.choice(("n", "gpu-", "a1-", "x-2-y")), rng.choice(("", "", "-ib"))
        width, numbers = rng.randint(1, 4), sorted(rng.sample(range(1000), rng.randint(1, 6)))
        shown = [f"{number:0{width}d}" for number in numbers]
        spans = ",".join(s if rng.random() < 0.5 else f"{s}-{int(s) + 3:0{width}d}" for s in shown)
        rest = rng.choice(("", ",other", ",m[1-2,4]"))
        assert first_host(f"{prefix}[{spans}]{suffix}{rest}") == prefix + shown[0] + suffix


# ----------------------------------------------------------------------------------------------------------------------
# frames


@contextlib.contextmanager
def connection(data):
    """The receiving end of a connection over which `data` come, before it ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: (theirs.sendall(data), theirs.shutdown(socket.SHUT_WR)))
        sender.start()
        ours.settimeout(5)
        yield ours
        sender.join()


def test_frames_return():
    rng = random.Random(1)
    frames = [["kind", rng.random() * 10.0 ** rng.randint(-300, 300), "x" * rng.randint(0, 100000)] for _ in range(20)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: [send_frame(theirs, *frame) for frame in frames] + [theirs.close()])
        sender.start()
        assert [receive_frame(ours) for _ in frames] == frames and receive_frame(ours) is None
        sender.join()


def test_frames_of_random_bytes():
    """Whatever comes is a frame, the end, or a ValueError; nothing else, and never a wait for what is not announced."""
    rng = random.Random(2)
    good = json.dumps(["value", [1, 2.5, None]]).encode()
    good = HEADER.pack(MAGIC, len(good)) + good
    for _ in range(300):
        random_json = HEADER.pack(MAGIC, 8) + rng.randbytes(8)
        data = bytearray(rng.choice((rng.randbytes(rng.randint(1, 200)), good, random_json)))
        for _ in range(rng.randint(0, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with connection(bytes(data[: rng.randint(1, len(data))])) as end:
            try:
                frame = receive_frame(end)
                assert frame is None or isinstance(frame, list)
            except ValueError:
                pass


@pytest.mark.parametrize("data", (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", HEADER.pack(MAGIC, LIMIT + 1), HEADER.pack(MAGIC, 2) + b"{}",
    HEADER.pack(MAGIC, 2) + b"[]", HEADER.pack(MAGIC, 3) + b"[1]", HEADER.pack(MAGIC, 100000) + b"[" * 100000,
    HEADER.pack(MAGIC, 5) + b"[", HEADER.pack(MAGIC, 2) + b"\xff\xff", MAGIC,
))
def test_no_frames(data):
    with connection(data) as end, pytest.raises(ValueError):
        receive_frame(end)


# ----------------------------------------------------------------------------------------------------------------------
# the meeting


def test_two_runs_with_one_port(program):
    """Runs are told apart by their id, also those that launchers on one machine start at once."""
    run = program("print(ranks.gather(os.environ['TORCHELASTIC_RUN_ID']))")
    for rank in (1, 0):
        for name in "ab":
            run.start(rank, 2, TORCHELASTIC_RUN_ID=name)
    assert [out for _, out, _ in run.end()] == ["", "", "['a', 'a']\n", "['b', 'b']\n"]


def test_port_taken(program, free_port):
    """On MASTER_PORT listens a server that never answers."""
    with socket.create_server(("127.0.0.1", free_port)):
        assert program("print(ranks.gather(1))").start_all(2).end()[0][1] == "[1, 1]\n"


def test_strangers(program, free_port):
    """Whoever else connects while the ranks meet is dropped, and holds nobody up."""
    run = program("print(ranks.gather(1))")
    run.start(0, 2)
    hello = json.dumps(["hello", "another run", 1, 2, "host", 1]).encode()
    strangers = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), HEADER.pack(MAGIC, LIMIT), b"\x16\x03\x01" * 9,
                 HEADER.pack(MAGIC, len(hello)) + hello, *(HEADER.pack(MAGIC, len(f)) + f for f in (
                     b'["hello"]', b'["hello", {}, [], 1, 1, 1]', b'["value", 1]', b'["end", 0]'))]
    connections = []
    for data in strangers:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(ConnectionRefusedError):  # it has not started yet
                connections.append(socket.create_connection(("127.0.0.1", free_port)))
                break
            assert time.monotonic() < deadline
        connections[-1].sendall(data)
    run.start(1, 2)
    assert [status for status, _, _ in run.end()] == [0, 0] and run.errors() == []
    for each in connections:
        each.close()


def test_missing(program):
    run = program("pass")
    run.start(2, 4), run.start(0, 4, SECONDS="3")
    (other, _, nothing), (status, _, err) = run.end()
    assert (status, other, nothing) == (1, 1, "")
    assert re.fullmatch(r"run0.py: error: ranks 1 and 3 of 4 did not come to 127.0.0.1:\d+ within 3 s: .*\n", err)


def test_waiting_is_said(program):
    run = program("pass")
    first = run.start(0, 2, NOTE="0.1")
    assert re.fullmatch(r"waiting for rank 1 of 2 at 127.0.0.1:\d+\n", first.stderr.readline())
    run.start(1, 2)
    assert [status for status, _, _ in run.end()] == [0, 0]


def test_first_rank_missing(program):
    run = program("pass")
    run.start(2, 4, SECONDS="0.5")
    (status, _, err), = run.end()
    assert status == 1
    assert re.fullmatch(r"rank 2: run0.py: error: cannot reach rank 0 at 127.0.0.1, ports \d+ to \d+, in 0.5 s"
                        r" \(Connection refused\): set MASTER_ADDR .*\n", err)


def test_sizes_differ(program):
    run = program("pass")
    run.start(0, 2), run.start(1, 4)
    (status, _, err), (other, _, nothing) = run.end()
    assert (status, other, nothing) == (1, 1, "") and err.count("\n") == 1
    assert "rank 1 (pid " in err and "is of 4 ranks, rank 0 of 2" in err


def test_rank_twice(program):
    run = program("pass")
    run.start(0, 3), run.start(1, 3), run.start(1, 3)
    assert [status for status, _, _ in run.end()] == [1, 1, 1]
    line, = run.errors()
    assert line.startswith("run0.py: error: rank 1 (pid ") and "has come after rank 1 (pid " in line


# ----------------------------------------------------------------------------------------------------------------------
# failures

TRAINING = """
    ranks.gather(0)
    say(f"ready {os.getpid()}")
    step = 0
    while True:
        step += 1
        ranks.gather(step)
        time.sleep(0.001)
"""


def wait_until_ready(process, rank):
    stream = process.stderr if rank else process.stdout
    assert stream.readline().startswith("ready")


@pytest.mark.parametrize("victim", range(3))
def test_killed(program, victim):
    """kill -9 of a rank: all others end within seconds, and one line says which it was. The first does not wait for it
    in gather(), but in what might be a kernel."""
    run = program(TRAINING.replace("while True:", "while ranks.rank == 1: time.sleep(1)\n    while True:"))
    run.start_all(3)
    for rank, process in enumerate(run.processes):
        wait_until_ready(process, rank)
    run.processes[victim].kill()
    began = time.monotonic()
    assert [status for status, _, _ in run.end()] == [-9 if rank == victim else 1 for rank in range(3)]
    assert time.monotonic() < began + 15
    errors = run.errors()
    pid = run.processes[victim].pid
    if victim:
        assert len(errors) == 1 and errors[0].startswith(f"run0.py: error: rank {victim} (pid {pid} on ")
        assert "ended unexpectedly; the last checkpoint, if any, is whole" in errors[0]
    else:
        assert len(errors) == 2
        for rank, line in enumerate(errors, 1):
            assert line.startswith(f"rank {rank}: run0.py: error: rank 0 (pid {pid} on ")


def test_a_death_is_told_although_nobody_reads_the_message(program):
    """As with `2>&1 | less`: rank 0's stderr is a full pipe."""
    run = program("""
        if ranks.is_first:
            os.set_blocking(2, False)
            try:
                while os.write(2, bytes(1 << 12)):
                    pass
            except BlockingIOError:
                os.set_blocking(2, True)
        ranks.gather(0)
        if ranks.rank == 1:
            os._exit(9)
        ranks.gather(1)
    """).start_all(3)
    assert [process.wait(timeout=10) for process in run.processes] == [1, 9, 1]


@pytest.mark.parametrize("who, first", (("ranks.rank == 2", "rank 2: error: disk full"), ("True", "error: disk full"),
                                        ("ranks.is_first", "error: disk full")))
def test_error(program, who, first):
    """An error of one rank, or the same of all, is one line of rank 0's, and the exit status of all."""
    run = program(f"""
        say("ready")
        ranks.gather(0)
        time.sleep(0.2 if ranks.is_first else 0)
        if {who}:
            raise UserError("disk full")
        while True:
            time.sleep(1)
    """)
    for rank, process in enumerate(run.start_all(3).processes):
        wait_until_ready(process, rank)
    began = time.monotonic()
    assert [status for status, _, _ in run.end()] == [1, 1, 1]
    assert run.errors() == [f"run0.py: {first}"] and time.monotonic() < began + 15


def test_traceback(program):
    """A fault of the program: the traceback comes once, whichever rank's it is."""
    run = program("ranks.gather(1 / (1 - ranks.rank))")
    assert [status for status, _, _ in run.start_all(3).end()] == [1, 1, 1]
    errors = run.errors()
    assert errors[0] == "run0.py: rank 1: Traceback (most recent call last):"
    assert all(line.startswith("rank 1: ") for line in errors[1:])
    assert errors[-1] == "rank 1: ZeroDivisionError: division by zero" and len(errors) < 12


@pytest.mark.parametrize("bad", ("ranks.size", "ranks.rank == 1"))
def test_bad_flag(program, bad):
    run = program(f"""
        import argparse
        with ranks.said_once():
            print("a warning", file=sys.stderr)
            argparse.ArgumentParser().parse_args(["-q"] if {bad} else [])
        ranks.gather(0)
    """)
    statuses = [status for status, _, _ in run.start_all(3).end()]
    errors = run.errors()
    assert errors.count("a warning") == 1
    assert sum("error: unrecognized arguments: -q" in line for line in errors) == 1
    if bad == "ranks.size":
        assert statuses == [2, 2, 2] and len(errors) == 3
    else:
        assert statuses == [1, 1, 1] and len(errors) == 2 and "rank 1: " in errors[1]


@pytest.mark.parametrize("rank, words", ((0, "sent 'value' where rank 0 waited for 'goodbye'"),
                                         (1, "sent 'goodbye' where rank 0 waited for 'value'")))
def test_end_of_one(program, rank, words):
    """A rank that ends well before the others is a fault of the program, and no deadlock."""
    run = program(f"if ranks.rank != {rank}: ranks.gather(0)")
    assert [status for status, _, _ in run.start_all(3).end()] == [1, 1, 1]
    assert words in run.errors()[-1] and sum(line.startswith("RuntimeError") for line in run.errors()) == 1


# ----------------------------------------------------------------------------------------------------------------------
# signals

STEPS = """
    interruption = Interruption(ranks.largest, speaks=ranks.is_first)
    ranks.gather(0)
    print("a warning", file=sys.stderr)
    print("ready", flush=True)
    steps = interruption.watching(range(100000))
    try:
        for step in steps:
            time.sleep(0.002 * ranks.rank)
    except Interrupted:
        print(f"stopped at {step} by {interruption.signal}", file=sys.stderr)
        time.sleep(float(os.environ.get("SAVING", 0)))
        return 3
"""


@pytest.mark.parametrize("number, to", ((signal.SIGINT, (0, 1, 2)), (signal.SIGTERM, (2,)), (signal.SIGHUP, (0,)),
                                        (signal.SIGINT, (1,))))
def test_signals(program, number, to):
    """To whichever ranks a signal goes, all stop at the same step, and one says so."""
    run = program(STEPS).start_all(3)
    assert lines_of(run.processes[0], 1) == ["ready"]
    time.sleep(0.1)
    for rank in to:
        run.processes[rank].send_signal(number)
    (first, *others) = [err for status, _, err in run.end() if status == 3]
    step = re.fullmatch(r"a warning\n\nfinishing this step; Ctrl-C once more to stop at once\nstopped at (\d+) by"
                        rf" {number:d}\n", first)[1]
    assert others == [f"rank {rank}: a warning\nrank {rank}: stopped at {step} by {number:d}\n" for rank in (1, 2)]


def test_second_interrupt(program):
    """It stops all at once, and is one more line."""
    run = program(STEPS).start_all(3, SAVING="20")
    assert lines_of(run.processes[0], 1) == ["ready"]
    for _ in range(2):
        time.sleep(0.1)
        for process in run.processes:
            process.send_signal(signal.SIGINT)
    assert [status for status, _, _ in run.end()] == [130, 130, 130]
    assert [line for line in run.errors() if "interrupted" in line] == ["run0.py: interrupted"]


def test_interrupt_at_the_meeting(program):
    run = program("pass")
    run.path.write_text(run.path.read_text().replace("with join", "print('joining', flush=True)\n    with join"))
    run.start(0, 3, NOTE="0.1").stderr.readline()
    assert lines_of(run.start(1, 3), 1) == ["joining"]
    time.sleep(0.1)
    for process in run.processes:
        process.send_signal(signal.SIGINT)
    assert [status for status, _, _ in run.end()] == [130, 130] and run.errors() == ["run0.py: interrupted"]


# ----------------------------------------------------------------------------------------------------------------------
# --gpus


def start_three(run):
    """The program, which starts three ranks of itself."""
    text = run.path.read_text().replace("run_main(main)", 'run_main(main if "RANK" in os.environ else lambda:'
                                                          ' start_ranks(3))')
    run.path.write_text(text)
    return run.start(0, 1, names=())


def gone(pids):
    """Whether these processes, no children of ours, end within 5 s."""
    def runs(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + 5
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(runs, pids))


def test_ctrl_c_while_sending(monkeypatch):
    """What is sent at the end of the run, by whichever thread, waits for no lock."""
    peer = object.__new__(Peer)
    peer.connection, peer.sending = None, threading.Lock()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("llmc.gpu.ranks.send_frame", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peer.send("value", 1)
    assert not peer.sending.locked()


def test_gpus(program):
    run = program("print(ranks.gather([ranks.rank, ranks.local_rank, ranks.local_size]))")
    start_three(run)
    assert run.end() == [(0, "[[0, 0, 3], [1, 1, 3], [2, 2, 3]]\n", "")]


def test_gpus_error(program):
    run = program("if ranks.rank == 2: raise UserError('disk full')")
    start_three(run)
    assert run.end() == [(1, "", "run0.py: rank 2: error: disk full\n")]


def test_gpus_killed_rank(program):
    run = program("pids = ranks.gather(os.getpid())\nprint(*pids, flush=True)\ntime.sleep(20)")
    start = start_three(run)
    pids = [int(pid) for pid in lines_of(start, 1)[0].split()]
    os.kill(pids[1], signal.SIGKILL)
    (status, _, err), = run.end()
    assert status in (1, 137) and err.count("\n") == 1 and f"rank 1 (pid {pids[1]} on " in err and gone(pids)


def test_gpus_one_never_comes(program):
    """The others are not left to wait for a rank that ended before it met them."""
    run = program("pass")
    early = "if os.environ['RANK'] == '1': return 7\n    with join"
    run.path.write_text(run.path.read_text().replace("with join", early))
    start_three(run)
    assert run.end() == [(7, "", "run0.py: error: rank 1 has ended with exit status 7; ranks 0 and 2 did not end, and"
                                 " were killed\n")]


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
def test_gpus_signals(program, number):
    """Signals to the process that started the ranks, whose group is the terminal's, reach each rank once."""
    run = program(STEPS)
    start = start_three(run)
    assert lines_of(start, 1) == ["ready"]
    os.killpg(start.pid, number)
    (status, _, err), = run.end()
    assert status == 3 and err.count("finishing this step") == 1 and err.count(f"by {number:d}\n") == 3
    assert len(set(re.findall(r"stopped at (\d+)", err))) == 1


def test_gpus_under_nohup(program):
    """It goes on when the terminal is closed."""
    run = program(STEPS)
    ignore = "if 'RANK' not in os.environ: signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    run.path.write_text(run.path.read_text().replace("run_main(", f"{ignore}run_main("))
    start = start_three(run)
    assert lines_of(start, 1) == ["ready"]
    for number in (signal.SIGHUP, signal.SIGTERM):
        os.killpg(start.pid, number)
    (status, _, err), = run.end()
    assert status == 3 and err.count("by 15\n") == 3


def test_gpus_parent_killed(program, tmp_path):
    """When nobody waits for the ranks any more, they save and stop."""
    run = program(STEPS.replace('print("ready"', 'print(*ranks.gather(os.getpid())').replace(
        "return 3", f"open(f'{tmp_path}/saved{{ranks.rank}}', 'w').write(str(step)); return 3"))
    start = start_three(run)
    pids = lines_of(start, 1)[0].split()
    start.kill()
    assert gone(pids)
    assert len({(tmp_path / f"saved{rank}").read_text() for rank in range(3)}) == 1
