"""The ranks of a run on several GPUs, one process each: how they meet, exchange small values, and end together.

Each rank keeps one TCP connection to rank 0, for small values in JSON: NCCL's id, then whatever all must agree on.
Tensors go over NCCL. A broken connection also shows at once that a process has died, while other GPUs may wait for it.

Only rank 0 prints: the other ranks' stdout is discarded, and each of their lines on stderr begins with the rank.
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
from llmc.gpu.launchers import PARENT, Launch, find_launch, meeting_place, names_of
from llmc.threads import leave_signals_alone

MEETING_SECONDS = 300  # for all ranks to connect
FIRST_NOTE_SECONDS = 5  # after which rank 0 prints which ranks it is waiting for
ANSWER_SECONDS = 3  # for rank 0 to answer a connection; other programs may listen on its ports
GRACE_SECONDS = 2  # for rank 0 to end with an error of its own, after another rank has reported one
END_SECONDS = 10  # for rank 0 to exit first, after it has told the other ranks to end

# ----------------------------------------------------------------------------------------------------------------------
# frames: magic, length, and a list in JSON whose first item is the frame's kind

HEADER = struct.Struct(">4sI")
MAGIC = b"rank"
LIMIT = 1 << 24  # bytes


def send_frame(connection, *frame):
    data = json.dumps(frame).encode()
    assert len(data) <= LIMIT, f"a frame of {len(data)} bytes"
    connection.sendall(HEADER.pack(MAGIC, len(data)) + data)


def receive_frame(connection):
    """The next frame, None at the end; raises ValueError for a malformed frame, OSError if the connection breaks."""
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
    """Receive `count` bytes, or none at the end; raises ValueError if the connection ends in between."""
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
    """The other end of a connection: on rank 0, another rank; on the others, rank 0."""

    def __init__(self, connection, rank, host, pid, size=None):
        self.connection, self.rank, self.host, self.pid, self.size = connection, rank, host, pid, size
        self.frames = queue.SimpleQueue()  # received by its reader thread
        self.sending = threading.Lock()
        self.over = False  # it has said goodbye
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that loses power sends nothing
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):  # 30 s
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30000)  # ms, for sent data

    def __str__(self):
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def send(self, *frame, seconds=-1):
        """Send a frame, unless another thread is still sending after `seconds` (-1: wait for it however long)."""
        if self.sending.acquire(timeout=seconds):
            try:
                with contextlib.suppress(OSError):  # its reader thread reports a broken connection
                    send_frame(self.connection, *frame)
            finally:  # also after Ctrl-C
                self.sending.release()


class Ranks:
    """The processes of a run, seen from one: its rank, size, local_rank and local_size (on this machine), is_first.

    Use it as the outermost `with` block of the program. All ranks leave it together: when one fails, all processes end
    with its exit status and one line on stderr. Ranks() is a single process; its methods return at once.
    """

    def __init__(self, launch=Launch()):
        self.rank, self.size = launch.rank, launch.size
        self.local_rank, self.local_size = launch.local_rank or 0, 1
        self.is_first = self.rank == 0
        self.has_launcher = False  # whether torchrun, mpirun or srun started the ranks
        self.peers = []  # on rank 0 all other ranks, in order; on the others rank 0
        self.reader = None  # on the others: the thread that reads what rank 0 sends
        self.arrivals = queue.SimpleQueue()  # on rank 0: Peers that have just connected
        self.ended = threading.Event()  # on rank 0: its block has ended with an error
        self.last_words = threading.Lock()  # held by the thread that ends the process; never released

    def gather(self, value):
        """Return the values of all ranks, in order, on every rank. JSON carries them; floats keep every bit."""
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
        """Call function() on each rank, and return all results, in order, on every rank. If it raises UserError on
        one rank, all ranks raise it."""
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
        """Return the largest of all ranks' numbers, with None as 0; None if all are None."""
        numbers = self.gather(number)
        return None if all(number is None for number in numbers) else max(number or 0 for number in numbers)

    def starmap(self, function, items, check=lambda: None):
        """Return [function(*item) for item in items] on every rank; each rank computes every size'th item. All ranks
        call `check` before each round of `size` items."""
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
        """Context manager for messages that are the same on all ranks: only rank 0 prints them. If another rank exits
        inside it, as argparse does after a bad flag, the last line it wrote goes to rank 0, like any error."""
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
        """Rank 0: wait for all others, then tell them the host names of all ranks, in order, and return these."""
        began, noted = time.monotonic(), False
        with listen(place) as listener:
            where = f"{place.host}:{listener.getsockname()[1]}"
            listener.settimeout(0.02)
            while len(self.peers) < self.size - 1:
                with contextlib.suppress(TimeoutError):
                    start_thread(self.serve, listener.accept()[0], place)
                for peer in self.take_arrivals():
                    self.admit(peer)
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

    def take_arrivals(self):
        """Yield the Peers that have connected; another thread may be doing the same."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self.arrivals.get_nowait()

    def admit(self, peer):
        same = [other for other in self.peers if other.rank == peer.rank]
        self.peers.append(peer)
        if peer.size != self.size:
            raise UserError(f"{peer} is of {peer.size} ranks, rank 0 of {self.size}: start all with the same number")
        if same or not 0 < peer.rank < self.size:
            who = f"{same[0]} has come" if same else "rank 0 is here"
            raise UserError(f"{peer} has come after {who}: start one process for each rank of 0 to {self.size - 1}")

    def follow(self, place, seconds):
        """Other ranks: connect to rank 0, and return the host names of all ranks, in order."""
        deadline, trouble = time.monotonic() + seconds, "no answer"
        host, pid = socket.gethostname(), os.getpid()
        while True:
            for port in place.ports:
                connection = None
                try:
                    connection = socket.create_connection((place.host, port), ANSWER_SECONDS)
                    send_frame(connection, "hello", place.run, self.rank, self.size, host, pid)
                    kind, *first = receive_frame(connection) or [None]
                    if kind == "met":
                        peer = Peer(connection, 0, *first)
                        self.reader = start_thread(self.read, peer)
                        self.peers = [peer]
                        return self.next_frame(peer, "welcome")[0]
                except (OSError, ValueError) as error:
                    trouble = getattr(error, "strerror", None) or trouble
                if connection:
                    connection.close()
            if time.monotonic() > deadline:
                raise UserError(f"cannot reach rank 0 at {place.host}, ports {place.ports[0]} to {place.ports[-1]}, in"
                                f" {seconds:g} s ({trouble}): set MASTER_ADDR to the host of rank 0, and the same free"
                                " MASTER_PORT for all ranks")
            time.sleep(0.05)

    # -- threads, one for each connection

    def serve(self, connection, place):
        """Rank 0's thread for one connection: drop a stranger; read the frames of a rank of this run until it ends."""
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
        """Pass a connection's frames to the main thread; act at once on those that end the run."""
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
            elif frame[0] == "end":  # wait for rank 0 to exit: launchers kill the other ranks once one has
                peer.connection.settimeout(END_SECONDS)
                with contextlib.suppress(OSError, ValueError):
                    while receive_frame(peer.connection):
                        pass
                leave_process(frame[1])
            else:
                peer.over = frame[0] == "goodbye"
                peer.frames.put(frame)

    def fail(self, text, status=1):
        """End this process and, on rank 0, all: a main thread may be waiting on its GPU for a rank that is gone."""
        if not self.last_words.acquire(blocking=False):
            return
        for peer in [*self.peers, *self.take_arrivals()] if self.is_first else ():
            peer.send("end", status, seconds=1)
        begin = "\n" if sys.stderr.isatty() else ""  # after a progress bar or ^C
        leave_process(status, f"{begin}{os.path.basename(sys.argv[0])}: {text}\n" if text else "")

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
        if self.is_first:  # no normal exit: the GPU may be waiting for a rank that is gone
            self.ended.set()
            self.fail(text, status)
            time.sleep(END_SECONDS)  # another thread is in fail(), and ends the process
        elif self.peers:
            self.peers[0].send("error", text or f"exit status {status}", status, seconds=GRACE_SECONDS)
            self.reader.join(GRACE_SECONDS + END_SECONDS)  # rank 0 ends this process, or has gone
            leave_process(status)

    def part(self):
        """Exchange goodbyes, which waits until all ranks have come to the end."""
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
    """Return the Ranks of this run, once all have met; a process that no launcher started is alone.

    seconds: how long to wait for the others. When a rank does not come or comes twice, or sizes differ, rank 0 prints
    an error and ends all. Raises UserError when rank 0 cannot be reached, or a launcher's variable is invalid.
    """
    launch = find_launch(environ)
    ranks = Ranks(launch)
    ranks.has_launcher = launch.launcher is not None and PARENT not in environ
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
    """Listen on the first free port, for this machine only if all ranks are on it; raises UserError if none is free."""
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

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def stop_without(pipe):
    """Send SIGTERM to this process when the process that holds the other end of the pipe is gone."""
    with contextlib.suppress(OSError):
        if not os.read(pipe, 1):
            os.kill(os.getpid(), signal.SIGTERM)


def leave_process(status, text=""):
    """Exit even if the main thread is busy. Prints text on stderr and flushes stdout, unless nobody reads a full pipe
    for a second."""
    def say():
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
            sys.stdout.flush()

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    thread.join(1)
    os._exit(status)


# ----------------------------------------------------------------------------------------------------------------------
# what they print


class RankOutput(io.TextIOWrapper):
    """stderr of a rank other than 0: each line begins with the rank."""

    prefix, begins = "", True

    def write(self, text):
        lines = text.splitlines(keepends=True)
        prefixed = "".join(self.prefix + line if self.begins or i else line for i, line in enumerate(lines))
        self.begins = text.endswith("\n") if text else self.begins
        super().write(prefixed)
        return len(text)

    def isatty(self):
        return False  # only rank 0 draws a progress bar


def speak_as(rank):
    RankOutput.prefix = f"rank {rank}: "
    sys.stdout = open(os.devnull, "w")
    sys.stderr.flush()
    sys.stderr = RankOutput(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
