"""The ranks of a run on several GPUs, a process each: how they meet, what they tell each other, how they end together.

Each keeps one TCP connection to rank 0, for small values in JSON: NCCL's id, then whatever all have to agree on.
Tensors go over NCCL. A connection also tells at once that a process has died, for which the others may wait on GPUs.

Rank 0 alone prints: of the others, stdout goes nowhere, and each line on stderr begins with the rank.
"""

import contextlib
import io
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time

from llmc.errors import UserError, describe
from llmc.launchers import PARENT, Launch, find_launch, meeting_place, names_of
from llmc.threads import leave_signals_alone

MEETING_SECONDS = 300  # for all ranks to come
FIRST_NOTE_SECONDS = 5  # then rank 0 says whom it waits for
ANSWER_SECONDS = 3  # for rank 0 to answer whoever calls it; others may listen on its ports
GRACE_SECONDS = 2  # for rank 0 to end with the error that another rank has ended with
END_SECONDS = 10  # for rank 0's last words, when another rank is about to end

# ----------------------------------------------------------------------------------------------------------------------
# frames: a list in JSON, its first item the kind, after a magic and the length

HEADER = struct.Struct(">4sI")
MAGIC = b"rank"
LIMIT = 1 << 24  # bytes


def send_frame(connection, *frame):
    data = json.dumps(frame).encode()
    assert len(data) <= LIMIT, f"a frame of {len(data)} bytes"
    connection.sendall(HEADER.pack(MAGIC, len(data)) + data)


def receive_frame(connection):
    """The next frame, None at the end; raises ValueError for what is none, OSError where the connection breaks."""
    header = receive_bytes(connection, HEADER.size)
    if not header:
        return None
    magic, length = HEADER.unpack(header)
    if magic != MAGIC or length > LIMIT:
        raise ValueError("no frame")
    try:
        frame = json.loads(receive_bytes(connection, length))
    except RecursionError:
        raise ValueError("no frame") from None
    if not (isinstance(frame, list) and frame and isinstance(frame[0], str)):
        raise ValueError("no frame")
    return frame


def receive_bytes(connection, count):
    """So many bytes, or none; raises ValueError where the connection ends between."""
    data = bytearray()
    while len(data) < count:
        more = connection.recv(min(count - len(data), 1 << 16))
        if not more:
            if data:
                raise ValueError("cut short")
            return b""
        data += more
    return bytes(data)


# ----------------------------------------------------------------------------------------------------------------------
# the ranks


class Peer:
    """The other end of a connection: any rank for rank 0, rank 0 for the others."""

    def __init__(self, connection, rank, host, pid, size=None):
        self.connection, self.rank, self.host, self.pid, self.size = connection, rank, host, pid, size
        self.frames = queue.SimpleQueue()  # that its reader thread received
        self.sending = threading.Lock()
        self.over = False  # it has said goodbye
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that has lost power says nothing
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):  # 30 s
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30000)  # ms, with something on its way

    def __str__(self):
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def send(self, *frame, seconds=-1):
        """seconds: how long to wait for another thread that is sending."""
        if self.sending.acquire(timeout=seconds):
            with contextlib.suppress(OSError):  # a broken connection is its reader's to tell
                send_frame(self.connection, *frame)
            self.sending.release()


class Ranks:
    """The processes of a run, one of which this is: rank, size, local_rank and local_size (on this machine), is_first.

    To be used in a `with` block, the outermost of the program, which all ranks leave together: when one ends in an
    error, all processes end, with its exit status, and one line on stderr. Ranks() is a process alone, for which there
    is nothing to do.
    """

    def __init__(self, launch=Launch()):
        self.rank, self.size = launch.rank, launch.size
        self.local_rank, self.local_size = launch.local_rank or 0, 1
        self.is_first = self.rank == 0
        self.peers = []  # of rank 0 all others in order, of the others rank 0
        self.arrivals = queue.SimpleQueue()  # rank 0: those that have come
        self.ended = threading.Event()  # rank 0's block has ended in an error
        self.last_words = threading.Lock()  # of whoever has the last words; never released

    def gather(self, value):
        """The values of all ranks, in their order, on every rank: what JSON knows, floats to the bit."""
        if self.size == 1:
            return [value]
        if not self.is_first:
            self.peers[0].send("value", value)
            return self.next_frame(self.peers[0], "values")[0]
        values = [value, *(self.next_frame(peer, "value")[0] for peer in self.peers)]
        for peer in self.peers:
            peer.send("values", values)
        return values

    def attempt(self, function):
        """What function() gives on each rank, in their order, on every rank. Where it raises UserError on one, all
        do."""
        value, error = None, None
        try:
            value = function()
        except UserError as raised:
            error = str(raised)
        results = self.gather([value, error])
        for rank, (_, failed) in enumerate(results):
            if failed is not None:
                raise UserError(f"rank {rank}: {failed}" if rank else failed)
        return [value for value, _ in results]

    def largest(self, number):
        """The largest of all ranks' numbers, where None counts as 0; None where all are None."""
        numbers = self.gather(number)
        return None if all(number is None for number in numbers) else max(number or 0 for number in numbers)

    def starmap(self, function, items, check=lambda: None):
        """[function(*item) for item in items], on every rank, of which each computes every size'th. All ranks call
        `check` before each round of them."""
        mine, count = [], 0
        for count, item in enumerate(items, 1):
            if (count - 1) % self.size == 0:
                check()
            if (count - 1) % self.size == self.rank:
                mine.append(function(*item))
        results = self.gather(mine)
        return [results[i % self.size][i // self.size] for i in range(count)]

    @contextlib.contextmanager
    def said_once(self):
        """For what all ranks say alike: within this block rank 0 alone prints. If another ends here, as argparse does
        after a bad flag, its last line goes to rank 0, as any error."""
        if self.is_first:
            yield
            return
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                yield
            except SystemExit as end:
                if not end.code:
                    raise
                raise UserError((said.getvalue().splitlines() or [f"exit status {end.code}"])[-1]) from None

    def next_frame(self, peer, kind):
        found, *rest = peer.frames.get()
        if found != kind:
            raise RuntimeError(f"{peer} sent {found!r} where rank {self.rank} waited for {kind!r}")
        return rest

    # -- the meeting

    def lead(self, place, seconds):
        """Rank 0's part."""
        began, noted = time.monotonic(), False
        with listen(place) as listener:
            where = f"{place.host}:{listener.getsockname()[1]}"
            listener.settimeout(0.02)
            while len(self.peers) < self.size - 1:
                with contextlib.suppress(TimeoutError):
                    start_thread(self.serve, listener.accept()[0], place)
                while not self.arrivals.empty():
                    self.admit(self.arrivals.get())
                missing = set(range(1, self.size)) - {peer.rank for peer in self.peers}
                waited = time.monotonic() - began
                if missing and waited > seconds:
                    raise UserError(f"{names_of(missing)} of {self.size} did not come to {where} within {seconds:g} s:"
                                    " start a process for each rank, with the same MASTER_ADDR and MASTER_PORT")
                if missing and waited > FIRST_NOTE_SECONDS and not noted:
                    noted = True
                    print(f"waiting for {names_of(missing)} of {self.size} at {where}", file=sys.stderr)
        self.peers.sort(key=lambda peer: peer.rank)
        hosts = [socket.gethostname(), *(peer.host for peer in self.peers)]
        for peer in self.peers:
            peer.send("welcome", hosts)
        return hosts

    def admit(self, peer):
        same = [other for other in self.peers if other.rank == peer.rank]
        self.peers.append(peer)
        if peer.size != self.size:
            raise UserError(f"{peer} is of {peer.size} ranks, rank 0 of {self.size}: start all with the same number")
        if same or not 0 < peer.rank < self.size:
            who = f"{same[0]} has come" if same else "rank 0 is here"
            raise UserError(f"{peer} has come after {who}: start one process for each rank of 0 to {self.size - 1}")

    def follow(self, place, seconds):
        """The other ranks' part."""
        deadline, trouble = time.monotonic() + seconds, "no answer"
        host, pid = socket.gethostname(), os.getpid()
        while not self.peers:
            for port in place.ports:
                connection = None
                try:
                    connection = socket.create_connection((place.host, port), ANSWER_SECONDS)
                    send_frame(connection, "hello", place.run, self.rank, self.size, host, pid)
                    kind, *first = receive_frame(connection) or [None]
                    if kind == "met":
                        self.peers = [Peer(connection, 0, *first)]
                        break
                except (OSError, ValueError) as error:
                    trouble = getattr(error, "strerror", None) or trouble
                if connection:
                    connection.close()
            if not self.peers and time.monotonic() > deadline:
                raise UserError(f"cannot reach rank 0 at {place.host}, ports {place.ports[0]} to {place.ports[-1]}, in"
                                f" {seconds:g} s ({trouble}): set MASTER_ADDR to the host of rank 0, and the same free"
                                " MASTER_PORT for all ranks")
            time.sleep(0.05)
        start_thread(self.read, self.peers[0])
        return self.next_frame(self.peers[0], "welcome")[0]

    # -- threads, one a connection

    def serve(self, connection, place):
        """Rank 0: a thread for whoever connects. Strangers are dropped; a rank of this run is read until it ends."""
        try:
            connection.settimeout(10)
            kind, run, rank, size, host, pid = receive_frame(connection) or [None] * 6
            if kind != "hello" or run != place.run or not isinstance(rank, int) or not isinstance(size, int):
                raise ValueError
            peer = Peer(connection, rank, host, pid, size)
            peer.send("met", socket.gethostname(), os.getpid())
        except (OSError, ValueError):
            connection.close()
            return
        self.arrivals.put(peer)
        self.read(peer)

    def read(self, peer):
        """Hand the frames of a connection to the main thread; act at once on those that end the run."""
        while True:
            try:
                frame = receive_frame(peer.connection)
            except (OSError, ValueError):
                frame = None
            if frame is None:
                if not peer.over:
                    self.fail(f"error: {peer} ended unexpectedly; the last checkpoint, if any, is whole: -y 1 resumes"
                              " from it")
                return
            if frame[0] == "error":
                text, status = frame[1:]
                if not self.ended.wait(GRACE_SECONDS):
                    self.fail("\n".join(f"rank {peer.rank}: {line}" for line in text.splitlines()), status)
            elif frame[0] == "end":  # rank 0 has the last words: launchers end the others when one has ended
                peer.connection.settimeout(END_SECONDS)
                with contextlib.suppress(OSError, ValueError):
                    while receive_frame(peer.connection):
                        pass
                leave_process(frame[1])
            else:
                peer.over = frame[0] == "goodbye"
                peer.frames.put(frame)

    def fail(self, text, status=1):
        """End this process and, on rank 0, all; the main thread may wait on its GPU for a rank that is gone."""
        if not self.last_words.acquire(blocking=False):
            return
        begin = "\n" if sys.stderr.isatty() else ""  # there may be a bar, or ^C
        if text:
            with contextlib.suppress(OSError):
                print(f"{begin}{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)
        while not self.arrivals.empty():
            self.peers.append(self.arrivals.get())
        for peer in self.peers if self.is_first else ():
            peer.send("end", status, seconds=1)
        leave_process(status)

    # -- the end

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if self.size == 1:
            return
        text, status = describe(error) if error else (None, 0)
        if status == 0:
            try:
                return self.part()
            except BaseException as error:
                text, status = describe(error)
        if self.is_first:  # not through the interpreter's end: the GPU may wait for a rank that is gone
            self.ended.set()
            self.fail(text, status)
            time.sleep(END_SECONDS)  # another thread is in fail()
        elif self.peers:
            self.peers[0].send("error", text or f"exit status {status}", status)
            time.sleep(GRACE_SECONDS + END_SECONDS)  # rank 0 ends this process
            leave_process(status)

    def part(self):
        """Say goodbye, when all have come to it."""
        if not self.is_first:
            self.peers[0].send("goodbye")
            self.next_frame(self.peers[0], "goodbye")
        else:
            for peer in self.peers:
                self.next_frame(peer, "goodbye")
            for peer in self.peers:
                peer.send("goodbye")


ALONE = Ranks()


def join(environ=os.environ, seconds=MEETING_SECONDS):
    """The Ranks of this run, once all have met; a process that no launcher started is alone.

    seconds: how long to wait for the others. Raises UserError, on rank 0 if it can, where one does not come, one comes
    twice, sizes differ, or a launcher's variable is no such number.
    """
    launch = find_launch(environ)
    ranks = Ranks(launch)
    if PARENT in environ:
        start_thread(stop_without, int(environ[PARENT]))
    if ranks.size == 1:
        return ranks
    if not ranks.is_first:
        speak_as(ranks.rank)
    place = meeting_place(launch, environ)
    try:
        hosts = ranks.lead(place, seconds) if ranks.is_first else ranks.follow(place, seconds)
    except BaseException:
        ranks.__exit__(*sys.exc_info())
        raise
    here = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    ranks.local_size = len(here)
    if launch.local_rank is None:
        ranks.local_rank = here.index(ranks.rank)
    return ranks


def listen(place):
    """A socket on the first port that is free; open to this machine alone if all ranks are here."""
    here = place.host in ("127.0.0.1", "localhost")
    for port in place.ports:
        try:
            if here or not socket.has_dualstack_ipv6():
                return socket.create_server(("127.0.0.1" if here else "", port), backlog=1024)
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            trouble = error.strerror
    raise UserError(f"cannot listen on any port of {place.ports[0]} to {place.ports[-1]} ({trouble}): set MASTER_PORT"
                    " to a free one, for all ranks")


def start_thread(function, *arguments):
    def run():
        leave_signals_alone()
        function(*arguments)

    threading.Thread(target=run, daemon=True).start()


def stop_without(pipe):
    """Stop as after SIGTERM when the process that holds the other end of the pipe has gone."""
    with contextlib.suppress(OSError):
        if not os.read(pipe, 1):
            os.kill(os.getpid(), signal.SIGTERM)


def leave_process(status):
    """Exit although the main thread is busy. What stdout and stderr still hold is written, if their readers take it."""
    def flush():
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(1)
    os._exit(status)


# ----------------------------------------------------------------------------------------------------------------------
# what they print


class RankOutput(io.TextIOWrapper):
    """stderr of a rank that is not the first: each line begins with it."""

    prefix, begins = "", True

    def write(self, text):
        lines = text.splitlines(keepends=True)
        prefixed = "".join(self.prefix + line if self.begins or i else line for i, line in enumerate(lines))
        self.begins = text.endswith("\n") if text else self.begins
        super().write(prefixed)
        return len(text)

    def isatty(self):
        return False  # bars are for the first


def speak_as(rank):
    RankOutput.prefix = f"rank {rank}: "
    sys.stdout = open(os.devnull, "w")
    sys.stderr.flush()
    sys.stderr = RankOutput(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
