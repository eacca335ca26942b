"""The client: values, errors, and what it does when the service comes and goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.service import CHAIN, LAYER, FakeService, running, served
from support.tools import CHECKOUT

from imgtool.exitcodes import ExitCode, of_error
from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    LimitError,
    MalformedError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from overlay.service import place
from overlay.service.client import Client, NotRunning
from overlay.service.messages import KINDS
from overlay.service.request import SandboxRequest

REQUEST = SandboxRequest(base="b", store="/store")


class Recorded:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def start(self, step: str, total: int | None) -> None:
        self.told.append((step, total))

    def advance(self, count: int) -> None:
        self.told.append((count,))


@contextmanager
def scripted(directory: Path, *connections: Callable[[socket.socket], None]) -> Iterator[Client]:
    """A client of a service that deals with each connection as the next function does."""

    def serve() -> None:
        for deal in connections:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(20)
                deal(connection)

    with place.listen(str(directory)) as listening:
        listening.settimeout(20)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with Client.at(str(directory / place.SOCKET), timeout=20) as client:
            yield client
        thread.join(20)
        assert not thread.is_alive()


def answering(body: bytes, status: str = "200 OK", head: str = "") -> Callable[[socket.socket], None]:
    def deal(connection: socket.socket) -> None:
        assert connection.recv(65536)
        connection.sendall(f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    return deal


def hanging_up(connection: socket.socket) -> None:
    assert connection.recv(65536)


def test_every_method_gives_values(tmp_path: Path) -> None:
    with served(tmp_path, FakeService()) as client:
        made = client.create(SandboxRequest(base="b", store="/store", id="a", count=2, read_only=True))
        assert [sandbox.id for sandbox in made] == ["a-1", "a-2"]
        assert made == client.sandboxes()
        one = client.sandbox("a-2")
        assert (one.rootfs, one.mode, one.backend) == ("/var/lib/imgtool/sandboxes/a-2/rootfs", "lazy", "fanotify")
        assert (one.mounted, one.condition, one.read_only, one.scratch, one.upper) == (True, "ok", True, None, None)
        assert (one.layers, one.chain, one.image["name"]) == ((LAYER,), CHAIN, "b")
        assert one.prefetch is not None and (one.prefetch["brought"], one.trace) == (180, None)
        assert one.raw["demand"] == {"frames": 0, "bytes": 0, "waited": 0.0, "events": 0, "failed": 0}
        status = client.status()
        assert (status.sandboxes, status.backend, status.pids["worker"]) == (2, "fanotify", 813)
        assert (status.uptime, status.stopping, status.cache.limit) == (86.5, False, 20_000_000_000)
        assert client.cache() == status.cache
        removal = client.remove("a-1")
        assert (removal.id, removal.existed, removal.stopped, removal.holders) == ("a-1", True, (), ())
        assert not client.remove("a-1").existed
        assert client.receipt("a-1")["id"] == "a-1"
        assert [removed.id for removed in client.remove_all()] == ["a-2"]
        assert [(item.kind, item.action) for item in client.recover()] == [("part of a sandbox", "removed")]
        assert client.pin("team/repo:1", "/store").name == "team/repo:1"
        assert [pin.name for pin in client.pins()] == ["team/repo:1"]
        client.unpin("team/repo:1")
        assert client.pins() == []
        assert client.evict(5) == 5
        client.create(SandboxRequest(base="b", store="/store", id="r"))
        recording = client.start_trace("r", "monday")
        assert (recording.sandbox, recording.name, recording.way) == ("r", "monday", "events")
        assert client.traces() == [recording]
        assert client.sandbox("r").trace == "monday"
        trace = client.stop_trace("r")
        assert (trace.path, trace.accesses, trace.complete) == ("/var/lib/imgtool/traces/monday.jsonl", 689, True)
        with pytest.raises(NotFoundError):
            client.stop_trace("r")
        client.start_trace("r")
        ended = client.remove("r").trace
        assert ended is not None and ended.name == "r"
        assert client.metrics().startswith("# HELP")
        assert client.stop().killed == ()


@pytest.mark.parametrize("in_lines", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_errors_are_those_of_a_call_in_the_process(kind: object, in_lines: bool, tmp_path: Path) -> None:
    service = FakeService()
    with served(tmp_path, service) as client:
        service.error = kind.error("what, where, and what to do")  # type: ignore[attr-defined]
        with pytest.raises(kind.error, match=r"^what, where, and what to do$") as caught:  # type: ignore[attr-defined]
            if in_lines:
                client.create(REQUEST, Recorded())
            else:
                client.status()
        assert of_error(caught.value) == of_error(kind.error(""))  # type: ignore[attr-defined]
        assert client.status().root == "/var/lib/imgtool"


def test_a_fault_of_the_service_is_one_here(tmp_path: Path) -> None:
    service = FakeService()
    with served(tmp_path, service) as client:
        service.error = KeyError("x")
        with pytest.raises(ImgtoolError, match="fault of the node service itself, KeyError") as caught:
            client.status()
        assert of_error(caught.value) is ExitCode.INTERNAL


@pytest.mark.parametrize(
    "name", ["..", ".", "a/b", "A", "a\0", "a?all=true", "a#b", "a b", "é", "\udcff", "%2e", "a" * 64]
)
def test_names_that_are_none_are_the_services_to_refuse(name: str, tmp_path: Path) -> None:
    service = FakeService()
    with served(tmp_path, service) as client:
        for call in (client.sandbox, client.remove, client.receipt):
            with pytest.raises(UsageError):
                call(name)
        assert service.calls == []


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_names_that_cant_be_sent_are_refused_here(name: str, tmp_path: Path) -> None:
    service = FakeService()
    with served(tmp_path, service) as client:
        for call in (client.sandbox, client.remove, client.receipt, client.unpin):
            with pytest.raises(UsageError):
                call(name)
        assert service.calls == []


def test_progress_is_handed_on(tmp_path: Path) -> None:
    service = FakeService()
    service.steps = [("metadata", 10), ("fetch", 1000)]
    service.may_go_on.clear()
    threading.Timer(0.25, service.may_go_on.set).start()  # so that the last line has the last state
    progress = Recorded()
    with served(tmp_path, service) as client:
        assert len(client.create(REQUEST, progress)) == 1
    last = max(index for index, told in enumerate(progress.told) if told == ("fetch", 1000))
    assert sum(int(str(told[0])) for told in progress.told[last + 1 :]) == 1000


def test_states_of_progress_become_steps_and_amounts(tmp_path: Path) -> None:
    body = b"".join(
        b'{"progress": %s}\n' % state
        for state in (
            b'{"step": "a", "total": null, "done": 0}',
            b'{"step": "a", "total": null, "done": 5}',
            b'{"step": "a", "total": null, "done": 5}',
            b'{"step": "a", "total": null, "done": 7}',
            b'{"step": "a", "total": null, "done": 1}',
            b'{"step": "b", "total": 9, "done": 9}',
            b'{"phase": "of tomorrow"}',
        )
    )
    body += b'{"hint": "of tomorrow"}\n' + b'{"result": {"sandboxes": []}}\n'
    progress = Recorded()
    with scripted(tmp_path, answering(body, head="Content-Type: application/x-ndjson\r\n")) as client:
        assert client.create(REQUEST, progress) == []
    assert progress.told == [("a", None), (5,), (2,), ("a", None), (1,), ("b", 9), (9,)]


def test_nobody_listening_is_an_error_of_its_own(tmp_path: Path) -> None:
    with Client.at(str(tmp_path / place.SOCKET)) as client, pytest.raises(NotRunning, match="imgtool node run"):
        client.status()
    place.listen(str(tmp_path)).close()
    with Client.at(str(tmp_path / place.SOCKET)) as client:
        with pytest.raises(NotRunning):
            client.create(REQUEST)
        with running_at(tmp_path):
            assert client.status().root == "/var/lib/imgtool"  # the same client, once there is one
    assert of_error(NotRunning("x")) is ExitCode.UNAVAILABLE


@contextmanager
def running_at(directory: Path) -> Iterator[FakeService]:
    service = FakeService()
    with place.listen(str(directory)) as listening, running(service, listening):
        yield service


def test_the_client_of_a_root_asks_at_the_roots_socket(tmp_path: Path) -> None:
    with Client(str(tmp_path)) as client, pytest.raises(NotRunning, match=place.socket_path(str(tmp_path))):
        client.status()


def test_socket_paths_may_be_long(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 250)
    directory.mkdir()
    with served(directory, FakeService()) as client:
        assert client.status().version


def test_a_worker_replaced_between_two_calls_is_not_noticed(tmp_path: Path) -> None:
    path = str(tmp_path / place.SOCKET)
    with place.listen(str(tmp_path)) as listening, Client.at(path) as client:
        with running(FakeService("/one"), listening):
            assert client.status().root == "/one"
        with running(FakeService("/two"), listening):
            assert client.create(REQUEST)[0].rootfs.startswith("/two/")  # not only calls that can be repeated


def test_calls_that_only_ask_are_repeated_once(tmp_path: Path) -> None:
    with scripted(tmp_path, hanging_up, answering(b'{"sandboxes": []}')) as client:
        assert client.sandboxes() == []
    with scripted(tmp_path, hanging_up, answering(b'{"removed": []}')) as client:
        assert client.remove_all() == []
    with scripted(tmp_path, hanging_up, hanging_up) as client, pytest.raises(UnavailableError, match="ended before"):
        client.sandboxes()


def test_calls_that_change_something_are_not_repeated(tmp_path: Path) -> None:
    for call in (
        lambda client: client.create(REQUEST),
        lambda client: client.create(REQUEST, Recorded()),
        lambda client: client.recover(),
        lambda client: client.evict(5),
        lambda client: client.stop(),
        lambda client: client.unpin("x"),
    ):
        with scripted(tmp_path, hanging_up) as client, pytest.raises(UnavailableError, match="whether it was done"):
            call(client)


def test_an_answer_that_breaks_off_is_no_answer(tmp_path: Path) -> None:
    def half(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"sandboxes"')

    def chunks(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'32\r\n{"progress": {"step": "a", "total": 5, "done": 1}}'
        )

    with scripted(tmp_path, half, half) as client, pytest.raises(UnavailableError):
        client.sandboxes()
    with scripted(tmp_path, chunks) as client, pytest.raises(UnavailableError):
        client.create(REQUEST, Recorded())
    body = b'{"progress": {"step": "a", "total": 5, "done": 1}}\n'
    whole = answering(body, head="Content-Type: application/x-ndjson\r\n")
    with scripted(tmp_path, whole) as client, pytest.raises(UnavailableError, match="no end"):
        client.create(REQUEST, Recorded())


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"\xff", b"{}", b'{"sandboxes": {}}', b'{"sandboxes": [{}]}', b'{"sandboxes": [5]}']
)
def test_an_answer_of_another_kind_is_malformed(body: bytes, tmp_path: Path) -> None:
    with scripted(tmp_path, answering(body)) as client, pytest.raises(MalformedError, match="node service"):
        client.sandboxes()


def test_what_isnt_http_is_an_error_in_one_line(tmp_path: Path) -> None:
    def garbage(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"\0" * 100)

    with scripted(tmp_path, garbage, garbage) as client, pytest.raises(UnavailableError) as caught:
        client.status()
    assert str(caught.value).isprintable()
    with scripted(tmp_path, answering(b"<html>", "502 Bad")) as client, pytest.raises(ImgtoolError, match="502"):
        client.status()


def test_an_answer_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    service = FakeService()
    service.may_go_on.clear()
    with (
        place.listen(str(tmp_path)) as listening,
        running(service, listening),
        Client.at(str(tmp_path / place.SOCKET), timeout=0.2) as client,
    ):
        with pytest.raises(UnavailableError, match="did not answer"):
            client.status()
        service.may_go_on.set()
        assert client.status().version  # nothing of the first answer is taken for the second


def test_a_request_too_large_is_not_sent(tmp_path: Path) -> None:
    class Large(SandboxRequest):
        def to_json(self) -> dict[str, object]:
            return {"x": "y" * (1 << 20)}

    service = FakeService()
    with served(tmp_path, service) as client:
        with pytest.raises(LimitError):
            client.create(Large(base="b", store="/s"))
        assert service.calls == []


def test_an_interrupted_create_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(Recorded):
        def start(self, step: str, total: int | None) -> None:
            raise KeyboardInterrupt

    service = FakeService()
    service.steps = [("fetch", 5)]
    service.may_go_on.clear()
    with place.listen(str(tmp_path)) as listening:
        with running(service, listening), Client.at(str(tmp_path / place.SOCKET)) as client:
            with pytest.raises(KeyboardInterrupt):
                client.create(REQUEST, Interrupted())
            service.may_go_on.set()
        assert service.calls[-1][0] == "remove"
        assert service.made == {}


def test_nothing_stays_open(tmp_path: Path) -> None:
    with served(tmp_path, FakeService()) as client:
        client.status()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            client.status()
            with pytest.raises(NotFoundError):
                client.sandbox("x")
            client.create(REQUEST, Recorded())
            client.close()
        client.status()
        with pytest.raises(ConflictError):
            client.create(SandboxRequest(base="b", store="/s", id=client.sandboxes()[0].id))
        end = time.monotonic() + 20
        while len(os.listdir("/proc/self/fd")) > before:  # the server's ends are closed by its threads
            assert time.monotonic() < end
            time.sleep(0.002)


def test_the_import_is_light() -> None:
    script = (
        "import sys, overlay.service.client; print([m for m in ('http.client', 'ssl', 'email', 'logging', 'yaml', "
        "'zstandard', 'prometheus_client', 'overlay.layers', 'overlay.service.request') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=CHECKOUT)
    assert ran.stdout == "[]\n"
