"""Hostile bytes at the API's socket, and in what comes back from it: an answer or an end, never a traceback."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http import talking
from support.service import FakeService, logged, running

from layerstore.errors import ImgtoolError, UsageError
from layerstore.store.names import check_name
from overlay.service import place
from overlay.service.answers import CacheInfo, NodeStatus, PinInfo, RemovalInfo, SandboxInfo, StopInfo
from overlay.service.request import ID
from overlay.service.routes import Refusal, find

METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "get", ""])
PREFIXES = ["/v1/sandboxes/", "/v1/receipts/", "/v1/pins/", "/v1/", "/", ""]
PIECES = st.sampled_from(
    ["..", ".", "/", "%2f", "%2F", "%2e", "%00", "%", "a", "A", "-", "é", "\0", "\n", "?", "&", "#"]
)


@given(METHODS, st.sampled_from(PREFIXES), st.one_of(st.text(), st.lists(PIECES).map("".join)))
def test_what_is_found_in_a_path_is_a_name_and_no_path(method: str, prefix: str, rest: str) -> None:
    try:
        route, name = find(method, prefix + rest)
    except (Refusal, UsageError):
        return
    assert route.method == method
    if "{id}" in route.path:
        assert ID.fullmatch(name)
    elif "{name}" in route.path:
        assert name == check_name(name) or name.startswith("sha256:")
        assert not {"", ".", ".."} & set(name.split("/"))
    else:
        assert name == ""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("service")
    with (
        logged() as records,
        place.listen(str(made)) as listening,
        running(FakeService(), listening, request_timeout=5.0),
    ):
        yield made
    assert [record for record in records if record.levelname in ("WARNING", "ERROR")] == []


HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [b"Host", b"Content-Length", b"Content-Type", b"Accept", b"Connection", b"X", b"", b" ", b"\xff"]
        ),
        st.one_of(
            st.sampled_from([b"0", b"5", b"-1", b"99999999999", b"application/json", b"close", b"keep-alive", b"*/*"]),
            st.binary(max_size=20),
        ),
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    METHODS,
    st.one_of(st.sampled_from(["/v1/status", "/v1/sandboxes", "/v1/stop?x", "/v1/pins/a"]), st.text(max_size=20)),
    HEADERS,
    st.binary(max_size=40),
)
def test_any_request_is_answered_or_ended(
    directory: Path, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    head = f"{method} {target} HTTP/1.1\r\n".encode() + b"".join(b"%s: %s\r\n" % header for header in headers)
    _check_answers(directory, head + b"\r\n" + body)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_answered_or_ended(directory: Path, data: bytes) -> None:
    _check_answers(directory, data)


def _check_answers(directory: Path, data: bytes) -> None:
    """Everything that comes back is HTTP with JSON in it."""
    with talking(directory) as talk:
        talk.send(data)
        talk.socket.shutdown(socket.SHUT_WR)
        received = b""
        while part := _received(talk.socket):
            received += part
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        assert status.startswith(b"HTTP/1.1 "), received
        if status == b"HTTP/1.1 100 Continue":
            received = rest
            continue
        fields = dict(line.split(b": ", 1) for line in lines)
        size = int(fields[b"Content-Length"])
        content, received = rest[:size], rest[size:]
        assert len(content) == size
        document = json.loads(content)
        assert ("error" in document) is (not status.startswith(b"HTTP/1.1 200 "))
        assert b"Traceback" not in content


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize("made", [NodeStatus, SandboxInfo, RemovalInfo, PinInfo, CacheInfo, StopInfo])
@given(data=st.data())
def test_an_answer_of_any_shape_is_a_value_or_an_error_of_ours(made: Any, data: st.DataObject) -> None:
    service = FakeService()
    names = [*service.status(), *service.cache(), "id", "existed", "stopped", "holders", "name", "content", "killed"]
    document = data.draw(JSON | st.dictionaries(st.sampled_from(names), JSON, max_size=8))
    try:
        made.from_json(document)
    except ImgtoolError:
        pass
    else:
        assert isinstance(document, dict)
