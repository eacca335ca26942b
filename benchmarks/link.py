"""A network link between clients and one server, as a process: latency for each turn, and a rate that all share.

::

    python -m benchmarks.link --listen HOST:PORT --to HOST:PORT --latency 0.005 --rate 200M [--control SOCKET]

prints one JSON line when it listens, and one with its counts when SIGTERM ends it. Who connects to the control socket
gets the counts so far. What it models, for TCP whatever it carries:

* **latency**: seconds of a round trip. All that a client sends arrives so much later, what comes back is not delayed:
  a turn (request, then answer) costs it once, wherever it is put. A connection costs it once more before its first
  turn, as the handshake of TCP does; those of TLS are turns.
* **rate**: bits a second in each direction, for all connections together. Chunks of 32 KiB of all connections leave one
  after the other in the order in which they came; a connection has one or two under way, so busy ones share evenly.
* No loss, no slow start, no limit of the window: the best that a link of these numbers can be.

Counts: connections; turns, which for HTTP without pipelining are requests; bytes in both directions; seconds of
processor time of the link itself, which come out of what clients and server have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.fileserver import free_address

CHUNK = 32 << 10
FREE_CHUNK = 1 << 20
"""Where no rate has to be kept: the fewer pieces, the less of the processors, which clients and server need."""
AHEAD = 2
"""Chunks that a connection may be ahead of the wire: its share goes on although timers are late."""
UNDELIVERED = 8 << 20
"""Bytes that wait for a receiver before no more are taken from the sender."""
_TICK = 0.00005
"""Seconds that no timer can wait exactly."""
_MOST_LATE = 0.001
"""More than that is no property of the machine, but something else that runs on it."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass
class Counts:
    connections: int = 0
    turns: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class Wire:
    """One direction of the link."""

    def __init__(self, rate: float) -> None:
        self.seconds_per_byte = 8 / rate if rate else 0.0
        self.chunk = CHUNK if rate else FREE_CHUNK
        self.lead = AHEAD * CHUNK * self.seconds_per_byte
        self._free = 0.0

    def send(self, count: int, now: float) -> float:
        """When the last of so many bytes, there from ``now`` on, has left."""
        self._free = max(self._free, now) + count * self.seconds_per_byte
        return self._free


class Flow:
    """One direction of one connection."""

    def __init__(self, wire: Wire, source: socket.socket, target: socket.socket) -> None:
        self.wire = wire
        self.source = source
        self.target = target
        self._queue: deque[tuple[float, bytes]] = deque()
        self._waiting = 0
        self._changed = asyncio.Event()

    async def take(self, delay: float, seen: Callable[[int], float]) -> None:
        loop = asyncio.get_running_loop()
        # When the next bytes could have been on the wire, had this process not been late.
        ready = loop.time()
        data = b"?"
        while data:
            try:
                data = self.source.recv(self.wire.chunk)
            except BlockingIOError:
                data = await loop.sock_recv(self.source, self.wire.chunk)
                ready = loop.time()
            left = self.wire.send(len(data), ready)
            self._queue.append((left + delay + seen(len(data)), data))
            self._waiting += len(data)
            self._changed.set()
            ready = left - self.wire.lead
            await _sleep_until(ready)
            while self._waiting > UNDELIVERED:
                await asyncio.sleep(0.005)
                ready = loop.time()

    async def deliver(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            due, data = self._queue.popleft()
            await _sleep_until(due)
            if not data:
                self.target.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self.target, data)
            self._waiting -= len(data)


class Turns:
    """The turns of one connection; the first is later by a handshake.

    Both methods count what passes, and return the seconds by which it is delayed besides.
    """

    def __init__(self, counts: Counts, handshake: float) -> None:
        self._counts = counts
        self._handshake = handshake
        self._asking = False

    def asked(self, count: int) -> float:
        self._counts.bytes_up += count
        if count and not self._asking:
            self._asking = True
            self._counts.turns += 1
        return self._handshake

    def answered(self, count: int) -> float:
        self._counts.bytes_down += count
        self._asking = False
        self._handshake = 0.0
        return 0.0


async def _sleep_until(when: float) -> None:
    seconds = when - asyncio.get_running_loop().time()
    if seconds > _TICK:
        await asyncio.sleep(seconds)


class Link:
    """The process's side: accepts, connects, and lets pass."""

    def __init__(self, to: str, latency: float, rate: float) -> None:
        self._to = _address(to)
        self._latency = self._delay = latency
        self._up, self._down = Wire(rate), Wire(rate)
        self.counts = Counts()
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            self.counts.connections += 1
            task = asyncio.create_task(self._serve(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with client, socket.socket() as server:
            for each in (client, server):
                each.setblocking(False)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            turns = Turns(self.counts, self._delay)
            up, down = Flow(self._up, client, server), Flow(self._down, server, client)
            try:
                await loop.sock_connect(server, self._to)
                async with asyncio.TaskGroup() as flows:
                    flows.create_task(up.take(self._delay, turns.asked))
                    flows.create_task(up.deliver())
                    flows.create_task(down.take(0.0, turns.answered))
                    flows.create_task(down.deliver())
            except* OSError:
                pass  # one of the two has gone; closing tells the other one

    async def allow_for_lateness(self) -> None:
        """Measure how late timers are here, and set them earlier by that."""
        loop = asyncio.get_running_loop()
        late = []
        for _ in range(15):
            due = loop.time() + self._latency
            await _sleep_until(due)
            late.append(loop.time() - due)
        self._delay = max(0.0, self._latency - min(_MOST_LATE, statistics.median(late)))

    def report(self) -> str:
        return json.dumps({**asdict(self.counts), "processor_seconds": round(time.process_time(), 3)})


async def _run(options: argparse.Namespace) -> None:
    link = Link(options.to, options.latency, options.rate)
    await link.allow_for_lateness()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(link.report().encode())
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        if options.control:
            await stack.enter_async_context(await asyncio.start_unix_server(tell, options.control))
        listener = stack.enter_context(socket.create_server(_address(options.listen), backlog=1024))
        listener.setblocking(False)
        accepting = asyncio.create_task(link.accept(listener))
        print(json.dumps({"listening": "{}:{}".format(*listener.getsockname())}), flush=True)
        await ended.wait()
        accepting.cancel()
        await asyncio.wait([accepting])  # its socket is closed after it has let go of it
    print(link.report(), flush=True)


class Simulated:
    """A link that runs in a process of its own.

    Attributes:
        address: ``HOST:PORT`` to connect to.
    """

    def __init__(self, address: str, control: Path) -> None:
        self.address = address
        self._control = control

    def counts(self) -> dict[str, float]:
        """So far: the fields of :class:`Counts`, and ``processor_seconds``."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._control))
            data = b"".join(iter(lambda: connection.recv(4096), b""))
        return json.loads(data)


@contextlib.contextmanager
def simulated(to: str, *, latency: float, rate: float, listen: str | None = None) -> Iterator[Simulated]:
    """A link to ``to`` (HOST:PORT) for as long as the block runs; ``latency`` in seconds, ``rate`` in bit/s or 0."""
    with tempfile.TemporaryDirectory(prefix="imgtool-link-") as work:
        control = Path(work, "control")
        command = [sys.executable, "-m", "benchmarks.link", "--listen", listen or free_address(), "--to", to]
        command += ["--latency", str(latency), "--rate", str(rate), "--control", str(control)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
        assert process.stdout is not None
        try:
            yield Simulated(json.loads(process.stdout.readline())["listening"], control)
        finally:
            process.terminate()
            process.communicate()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def rate(text: str) -> float:
    """Bits a second: ``200M``, ``1G``, ``0`` for no limit."""
    match = re.fullmatch(r"([0-9.]+)([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 200M")
    return float(match[1]) * _UNITS[match[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--latency", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--rate", type=rate, default=0.0, metavar="BITS", help="a second, such as 200M; 0 for no limit")
    parser.add_argument("--control", metavar="SOCKET")
    # select(2) waits by the microsecond, where epoll_wait(2) rounds up to the next millisecond.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
