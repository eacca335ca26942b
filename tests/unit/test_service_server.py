"""The API server: what it takes, what it refuses, and that nobody can hold others up."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http import Talk, talking
from support.service import FakeService, logged, running

from layerstore import errors
from layerstore.errors import CorruptError, ImgtoolError, NoSpaceError
from overlay.service import place
from overlay.service.messages import KINDS, MAX_BODY, MAX_MESSAGE, error_document, error_of
from overlay.service.routes import ROUTES
from overlay.service.server import ApiServer, user_of

REQUEST = {"base": "b", "store": "/store"}


@contextlib.contextmanager
def serving(directory: Path, **options: Any) -> Iterator[tuple[FakeService, ApiServer]]:
    service = FakeService()
    with place.listen(str(directory)) as listening, running(service, listening, **options) as server:
        yield service, server


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_every_endpoint_answers_with_what_the_service_says(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        assert talk.ask("GET", "/v1/status").json["sandboxes"]["total"] == 0
        made = talk.ask("POST", "/v1/sandboxes", {**REQUEST, "id": "a", "count": 2}).json["sandboxes"]
        assert [sandbox["id"] for sandbox in made] == ["a-1", "a-2"]
        assert talk.ask("GET", "/v1/sandboxes").json["sandboxes"] == made
        assert talk.ask("GET", "/v1/sandboxes/a-2").json == made[1]
        assert talk.ask("DELETE", "/v1/sandboxes/a-1").json["existed"] is True
        assert talk.ask("DELETE", "/v1/sandboxes/a-1").json["existed"] is False
        assert talk.ask("GET", "/v1/receipts/a-1").json["id"] == "a-1"
        assert [one["id"] for one in talk.ask("DELETE", "/v1/sandboxes?all=true").json["removed"]] == ["a-2"]
        assert talk.ask("POST", "/v1/recover").json["leftovers"][0]["action"] == "removed"
        assert talk.ask("PUT", "/v1/pins/team/repo:1", {"store": "/store"}).json["name"] == "team/repo:1"
        assert [pin["name"] for pin in talk.ask("GET", "/v1/pins").json["pins"]] == ["team/repo:1"]
        assert talk.ask("DELETE", "/v1/pins/team/repo:1").json == {"name": "team/repo:1"}
        assert talk.ask("GET", "/v1/cache").json["packs"] == 12
        assert talk.ask("POST", "/v1/cache/evict", {"bytes": 5}).json["freed"] == 5
        assert talk.ask("POST", "/v1/sandboxes", {**REQUEST, "id": "r"}).status == 200
        started = talk.ask("POST", "/v1/traces", {"sandbox": "r", "name": "monday"}).json
        assert (started["sandbox"], started["name"], started["way"]) == ("r", "monday", "events")
        assert talk.ask("GET", "/v1/traces").json == {"traces": [started]}
        assert talk.ask("GET", "/v1/sandboxes/r").json["trace"] == "monday"
        assert talk.ask("DELETE", "/v1/traces/r").json["accesses"] == 689
        assert talk.ask("DELETE", "/v1/traces/r").kind == "not-found"
        assert talk.ask("DELETE", "/v1/sandboxes/r").json["trace"] is None
        answer = talk.ask("GET", "/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert answer.body.startswith(b"# HELP")
        assert talk.ask("POST", "/v1/stop").json["stopped"] is True
        called = {call[0] for call in service.calls}
    assert called == {name for name in vars(FakeService) if name[0] != "_" and name != "root"}


def test_a_trace_is_of_a_sandbox_and_has_the_name_of_a_file(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        for body, said in (
            ({}, "trace lacks the field 'sandbox'"),
            ({"sandbox": "../x"}, "not a sandbox id"),
            ({"sandbox": "a", "name": "../x"}, "has a slash"),
            ({"sandbox": "a", "name": ".hidden"}, "is not a reference name"),
            ({"sandbox": "a", "name": 3}, "name is an integer where a string belongs"),
            ({"sandbox": "a", "x": 1}, "trace has no field 'x'"),
        ):
            answer = talk.ask("POST", "/v1/traces", body)
            assert (answer.status, answer.kind) == (400, "usage")
            assert said in answer.json["error"]["message"]
        assert service.calls == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_error_travels_as_its_kind(kind: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        service.error = kind.error("disk on fire: at /x")
        answer = talk.ask("GET", "/v1/status")
        assert (answer.status, answer.kind) == (kind.status, kind.name)
        back = error_of(answer.json)
        assert type(back) is kind.error
        assert str(back) == "disk on fire: at /x"
        assert talk.ask("GET", "/v1/status").status == 200  # on the same connection


def test_every_class_of_errors_has_a_kind_of_its_own() -> None:
    assert {kind.error for kind in KINDS} == set(ImgtoolError.__subclasses__())
    assert len({kind.name for kind in KINDS}) == len({kind.status for kind in KINDS}) == len(KINDS)


def test_a_subclass_is_of_its_ancestors_kind_and_messages_are_one_bounded_line() -> None:
    class Special(CorruptError):
        pass

    document = error_document(Special("bad\nline\x1b[0m" + "x" * 10_000, expected="a", actual="b"))
    inner = document["error"]
    assert isinstance(inner, dict)
    assert inner["kind"] == "corrupt"
    assert inner["message"].isprintable()
    assert len(inner["message"]) == MAX_MESSAGE
    assert type(error_of({"error": {"kind": "of tomorrow", "message": "x"}})) is ImgtoolError
    assert type(error_of({"error": 5})) is ImgtoolError


def test_a_fault_of_the_service_shows_no_traceback_and_is_logged(tmp_path: Path) -> None:
    with logged() as records, serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        service.error = ZeroDivisionError("secret")
        answer = talk.ask("GET", "/v1/status")
        assert (answer.status, answer.kind) == (500, "internal")
        assert b"secret" not in answer.body
        assert b"Traceback" not in answer.body
        record = next(record for record in records if record.getMessage() == "request failed")
        assert "ZeroDivisionError: secret" in record.of_node["traceback"]  # type: ignore[attr-defined]
        service.error = TimeoutError("of the service, not of the request")
        assert talk.ask("GET", "/v1/status").status == 500


def test_an_answer_that_is_no_json_is_a_fault(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        service.made["a"] = {"x": object()}
        assert talk.ask("GET", "/v1/sandboxes/a").status == 500
        service.made["a"] = {"x": float("nan")}
        assert talk.ask("GET", "/v1/sandboxes/a").status == 500


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/", 404),
        ("GET", "/v2/status", 404),
        ("GET", "/v1/status/", 404),
        ("GET", "/v1/sandboxes/", 404),
        ("GET", "http://node/v1/status", 404),
        ("GET", "/v1/recover", 405),
        ("HEAD", "/v1/status", 405),
        ("POST", "/v1/status", 405),
        ("PATCH", "/v1/sandboxes/a", 405),
        ("X" * 100, "/v1/status", 405),
        ("PUT", "/v1/sandboxes/../status", 400),
        ("GET", "/v1/sandboxes/..", 400),
        ("GET", "/v1/sandboxes/.", 400),
        ("GET", "/v1/sandboxes/.hidden", 400),
        ("GET", "/v1/sandboxes/%2e%2e", 400),
        ("GET", "/v1/sandboxes/..%2f..%2fetc", 400),
        ("GET", "/v1/sandboxes/a%2Fb", 400),
        ("GET", "/v1/sandboxes/a/b", 400),
        ("GET", "/v1/sandboxes/a%00", 400),
        ("GET", "/v1/sandboxes/%0aa", 400),
        ("GET", "/v1/sandboxes/%ff", 400),
        ("GET", "/v1/sandboxes/%c3%a9", 400),
        ("GET", "/v1/sandboxes/a%zz", 400),
        ("GET", "/v1/sandboxes/%252e%252e", 400),
        ("GET", "/v1/sandboxes/A", 400),
        ("GET", "/v1/sandboxes/-a", 400),
        ("GET", "/v1/sandboxes/" + "a" * 64, 400),
        ("GET", "/v1/sandboxes/" + "a" * 5000, 400),
        ("GET", "/v1/" + "a/" * 800, 400),
        ("GET", "/v1/receipts/../../etc/passwd", 400),
        ("DELETE", "/v1/pins/../x", 400),
        ("DELETE", "/v1/pins/a/../x", 400),
        ("DELETE", "/v1/pins/team%2Frepo", 400),
        ("DELETE", "/v1/pins/a//b", 400),
        ("DELETE", "/v1/pins/sha256:abc", 400),
        ("DELETE", "/v1/pins/" + "a" * 256, 400),
        ("GET", "/v1/status?verbose=1", 400),
        ("GET", "/v1/sandboxes/a?x", 400),
        ("DELETE", "/v1/sandboxes", 400),
        ("DELETE", "/v1/sandboxes?all=false", 400),
        ("DELETE", "/v1/sandboxes?all=true&all=true", 400),
        ("DELETE", "/v1/sandboxes?all=true&x=1", 400),
        ("DELETE", "/v1/sandboxes?all=%ff", 400),
        ("DELETE", "/v1/sandboxes?all=true;x", 400),
        ("DELETE", "/v1/sandboxes?" + "all=true&" * 20, 400),
    ],
)
def test_a_path_that_is_none_of_ours_reaches_nobody(method: str, target: str, status: int, tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        answer = talk.ask(method, target)
        assert answer.status == status
        assert answer.kind == ("usage" if status == 400 else "unsupported")
        assert answer.message.isprintable()
        assert ("Allow" in answer.headers) is (status == 405)
        assert service.calls == []
        assert talk.ask("GET", "/v1/status").status == 200


def test_ids_are_of_the_grammar_that_layers_have() -> None:
    from overlay.layers import USER
    from overlay.service.request import ID

    assert ID.pattern == USER.pattern


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body"),
        (b"[]", "array"),
        (b'"x"', "string"),
        (b'{"base": "b", "store": "/s", "base": "c"}', "base"),
        (b'{"base": "b", "store": "/s", "x": 1}', "'x'"),
        (b'{"base": 5, "store": "/s"}', "base"),
        (b'{"store": "/s"}', "base"),
        (b'{"base": "b", "store": "relative"}', "absolute"),
        (b'{"base": "b", "store": "/s", "id": "../x"}', "id"),
        (b'{"base": "b", "store": "/s", "scratch": NaN}', "NaN"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "the body"),
        (b'{"a":' * 1000, "the body"),
    ],
)
def test_a_body_that_is_wrong_is_refused_in_one_line(body: bytes, message: str, tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        answer = talk.ask("POST", "/v1/sandboxes", body)
        assert (answer.status, answer.kind) == (400, "usage")
        assert message in answer.message
        assert service.calls == []
        assert talk.ask("GET", "/v1/status").status == 200


@pytest.mark.parametrize("body", [{}, {"bytes": -1}, {"bytes": True}, {"bytes": "5"}, {"bytes": 5, "force": True}])
def test_an_eviction_says_how_much(body: object, tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        assert talk.ask("POST", "/v1/cache/evict", body).status == 400
        assert service.calls == []


def test_bodies_are_json_and_only_where_one_belongs(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        for media_type in ("text/plain", "", "application/x-www-form-urlencoded", "application/jsonp"):
            answer = talk.ask("POST", "/v1/sandboxes", REQUEST, Content_Type=media_type)
            assert (answer.status, answer.kind) == (415, "usage")
        assert talk.ask("GET", "/v1/status", {"a": 1}).status == 400
        assert service.calls == []
        answer = talk.ask("POST", "/v1/sandboxes", REQUEST, Content_Type="Application/JSON; charset=utf-8")
        assert answer.status == 200


@pytest.mark.parametrize("length", ["-1", "+5", "5, 5", "", "0x5", "५", "5\r\nContent-Length: 6"])
def test_a_length_that_is_no_number_ends_the_connection(length: str, tmp_path: Path) -> None:
    with serving(tmp_path), talking(tmp_path) as talk:
        talk.send(f"POST /v1/recover HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
        answer = talk.answer()
        assert answer.status == 400
        assert answer.headers["Connection"] == "close"
        assert talk.has_ended()


@pytest.mark.parametrize("size", [MAX_BODY + 1, 3 * MAX_BODY])
def test_a_body_that_is_too_large_is_refused_and_its_sender_gets_to_know(size: int, tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        answer = talk.ask("POST", "/v1/sandboxes", b" " * size)
        assert (answer.status, answer.kind) == (413, "limit")
        assert talk.has_ended()
        assert service.calls == []


def test_sizes_that_nobody_can_send_are_refused_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, request_timeout=0.2), talking(tmp_path) as talk:
        talk.send(b"POST /v1/recover HTTP/1.1\r\nContent-Length: " + b"9" * 4000 + b"\r\n\r\n")
        assert talk.answer().status == 413


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + (b"X: " + b"y" * 1000 + b"\r\n") * 99 + b"\r\n", 431),
        (b"GET / HTTP/3.0\r\n\r\n", 505),
        (b"GET / HTTP/one\r\n\r\n", 400),
        (b"GET / x HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 \x01 \x02 \x03\r\n\r\n", 400),
        (b"POST /v1/recover HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    ],
)
def test_what_is_hardly_http_gets_an_answer_in_json(request_: bytes, status: int, tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        talk.send(request_)
        answer = talk.answer()
        assert answer.status == status
        assert answer.kind == "usage"
        assert answer.message.isprintable()
        assert talk.has_ended()
        assert service.calls == []


def test_requests_may_follow_each_other_without_waiting(tmp_path: Path) -> None:
    with serving(tmp_path), talking(tmp_path) as talk:
        talk.send(b"GET /v1/cache HTTP/1.1\r\n\r\n" * 20 + b"GET /v1/cache HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert [talk.answer().status for _ in range(21)] == [200] * 21
        assert talk.has_ended()


def test_http_1_0_gets_one_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        service.steps = [("fetch", 5)]
        body = json.dumps(REQUEST).encode()
        talk.send(
            b"POST /v1/sandboxes HTTP/1.0\r\nAccept: application/x-ndjson\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert len(talk.answer().json["sandboxes"]) == 1  # no chunks
        assert talk.has_ended()


def test_who_expects_to_be_told_to_continue_is_told(tmp_path: Path) -> None:
    with serving(tmp_path), talking(tmp_path) as talk:
        body = json.dumps(REQUEST).encode()
        head = b"POST /v1/sandboxes HTTP/1.1\r\nExpect: 100-continue\r\nContent-Type: application/json\r\n"
        talk.send(head + b"Content-Length: %d\r\n\r\n" % len(body))
        assert talk.socket.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        talk.send(body)
        assert talk.answer().status == 200


@pytest.mark.parametrize(
    "half",
    [
        b"G",
        b"GET /v1/status HTTP/1.1\r\nHost: node\r\n",
        b"POST /v1/recover HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
    ],
)
def test_a_request_that_stays_half_is_given_up_and_holds_nobody_up(half: bytes, tmp_path: Path) -> None:
    with serving(tmp_path, request_timeout=0.3) as (_, server), talking(tmp_path) as stuck:
        stuck.send(half)
        with talking(tmp_path) as talk:
            assert talk.ask("GET", "/v1/status").status == 200
        answer = stuck.answer()
        assert (answer.status, answer.kind) == (408, "usage")
        assert stuck.has_ended()
        until(lambda: not server._connections)


def test_a_request_that_drips_has_no_more_time_than_any_other(tmp_path: Path) -> None:
    with serving(tmp_path, request_timeout=0.3), talking(tmp_path) as slow:
        slow.send(b"GET /")
        end = time.monotonic() + 20
        while not _readable(slow):  # each byte comes long before a read would time out
            assert time.monotonic() < end
            with contextlib.suppress(BrokenPipeError):
                slow.send(b"x")
            time.sleep(0.02)
        assert slow.answer().status == 408


def _readable(talk: Talk) -> bool:
    return bool(select.select([talk.socket], [], [], 0)[0])


def test_an_answer_that_isnt_taken_is_given_up(tmp_path: Path) -> None:
    with serving(tmp_path, send_timeout=0.2) as (service, server), talking(tmp_path) as stuck:
        service.made = {f"a{number}": {"id": "x" * 1000} for number in range(3000)}
        stuck.send(b"GET /v1/sandboxes HTTP/1.1\r\n\r\n")
        with talking(tmp_path) as talk:
            assert talk.ask("GET", "/v1/status").status == 200
        until(lambda: not server._connections)


def test_idle_connections_are_closed_after_a_time(tmp_path: Path) -> None:
    with serving(tmp_path, idle_timeout=0.1), talking(tmp_path) as talk:
        assert talk.ask("GET", "/v1/status").status == 200
        assert talk.has_ended()


def test_control_calls_are_answered_while_others_take_long(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), contextlib.ExitStack() as stack:
        service.may_go_on.clear()
        slow = [stack.enter_context(talking(tmp_path)) for _ in range(20)]
        body = json.dumps(REQUEST).encode()
        for talk in slow:
            head = b"POST /v1/sandboxes HTTP/1.1\r\nContent-Type: application/json\r\n"
            talk.send(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        for _ in slow:
            assert service.entered.acquire(timeout=20)
        called = service._called
        service._called = lambda *call: None  # type: ignore[method-assign]
        with talking(tmp_path) as talk:
            assert talk.ask("GET", "/v1/status").status == 200
            assert talk.ask("DELETE", "/v1/sandboxes/x").status == 200
        service._called = called  # type: ignore[method-assign]
        service.may_go_on.set()
        assert {talk.answer().status for talk in slow} == {200}


def test_when_all_connections_are_taken_an_idle_one_makes_room(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections=4) as (_, server), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(talking(tmp_path)) for _ in range(3)]
        for talk in idle:
            assert talk.ask("GET", "/v1/status").status == 200
        for _ in range(10):
            with talking(tmp_path) as talk:
                assert talk.ask("GET", "/v1/status").status == 200
        assert any(_readable(talk) and talk.has_ended() for talk in idle)
        assert len(server._connections) <= 4


def test_when_all_connections_are_busy_others_wait_their_turn(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections=2) as (service, _), contextlib.ExitStack() as stack:
        service.may_go_on.clear()
        talks = [stack.enter_context(talking(tmp_path)) for _ in range(6)]
        for talk in talks:
            talk.send(b"GET /v1/status HTTP/1.1\r\n\r\n")
        assert service.entered.acquire(timeout=20)
        assert service.entered.acquire(timeout=20)
        service.may_go_on.set()
        assert [talk.answer().status for talk in talks] == [200] * 6


def test_shutdown_ends_idle_connections_and_waits_for_requests(tmp_path: Path) -> None:
    service = FakeService()
    service.may_go_on.clear()
    with (
        place.listen(str(tmp_path)) as listening,
        running(service, listening) as server,
        talking(tmp_path) as idle,
        talking(tmp_path) as busy,
    ):
        busy.send(b"GET /v1/status HTTP/1.1\r\n\r\n")
        assert service.entered.acquire(timeout=20)
        server.shutdown()
        assert idle.has_ended()
        service.may_go_on.set()
        assert busy.answer().status == 200
        assert busy.has_ended()


def test_stop_is_answered_before_the_server_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, server), talking(tmp_path) as talk:
        service.made["a"] = {"id": "a"}
        answer = talk.ask("POST", "/v1/stop", {"force": False})
        assert (answer.status, answer.kind) == (409, "conflict")
        assert not server.stopping
        answer = talk.ask("POST", "/v1/stop", {"force": True})
        assert answer.json["stopped"] is True
        assert talk.has_ended()
        assert server.stopping


def test_requests_that_dont_end_delay_the_shutdown_only_so_long(tmp_path: Path) -> None:
    service = FakeService()
    service.may_go_on.clear()
    with place.listen(str(tmp_path)) as listening:
        server = ApiServer(service, listening, drain_timeout=0.1)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        with talking(tmp_path) as busy:
            busy.send(b"GET /v1/status HTTP/1.1\r\n\r\n")
            assert service.entered.acquire(timeout=20)
            server.shutdown()
            thread.join(20)
            assert not thread.is_alive()
            service.may_go_on.set()
            assert busy.answer().status == 200
        server.shutdown()  # again, and after the end


def test_the_socket_stays_for_a_successor(tmp_path: Path) -> None:
    with place.listen(str(tmp_path)) as listening:
        with running(FakeService("/one"), listening), talking(tmp_path) as talk:
            assert talk.ask("GET", "/v1/status").json["root"] == "/one"
        with talking(tmp_path) as waiting:
            waiting.send(b"GET /v1/status HTTP/1.1\r\n\r\n")  # between two workers
            with running(FakeService("/two"), listening):
                assert waiting.answer().json["root"] == "/two"


def test_others_than_root_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, users=()) as (service, _), talking(tmp_path) as talk:
        for _ in range(2):
            answer = talk.ask("POST", "/v1/sandboxes", REQUEST)
            assert (answer.status, answer.kind) == (403, "permission")
        assert service.calls == []


def test_the_peer_is_asked_of_the_kernel() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert user_of(one) == os.getuid()


def lines_of(talk: Talk, body: object) -> tuple[int, list[Any]]:
    answer = talk.ask("POST", "/v1/sandboxes", body, Accept="application/x-ndjson")
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    return answer.status, [json.loads(line) for line in answer.body.splitlines()]


def test_progress_comes_in_lines_and_the_result_at_last(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        service.steps = [("metadata", 10), ("fetch", 1000)]
        service.may_go_on.clear()
        threading.Timer(0.25, service.may_go_on.set).start()  # so that the last line has the last state
        status, lines = lines_of(talk, {**REQUEST, "id": "a"})
        assert status == 200
        assert lines[-2] == {"progress": {"step": "fetch", "total": 1000, "done": 1000}}
        assert [sandbox["id"] for sandbox in lines[-1]["result"]["sandboxes"]] == ["a"]
        assert all("progress" in line for line in lines[:-1])
        assert talk.ask("GET", "/v1/status").status == 200


def test_an_error_after_progress_is_the_last_line(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        service.steps = [("fetch", 1000)]
        service.error = NoSpaceError("full")
        status, lines = lines_of(talk, REQUEST)
        assert status == 200
        assert lines[-1] == {"error": {"kind": "no-space", "message": "full"}}


def test_without_progress_the_status_is_the_errors(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, _), talking(tmp_path) as talk:
        service.error = errors.ConflictError("taken")
        assert lines_of(talk, REQUEST) == (409, [{"error": {"kind": "conflict", "message": "taken"}}])
        status, lines = lines_of(talk, REQUEST)
        assert status == 200
        assert len(lines) == 1
        assert talk.ask("GET", "/v1/status", Accept="application/x-ndjson").json["root"]


def test_who_reports_progress_never_waits_for_who_reads_it(tmp_path: Path) -> None:
    with serving(tmp_path, send_timeout=0.2) as (service, server), talking(tmp_path) as stuck:
        service.steps = [("x" * 500_000, 5)]  # more than a socket takes
        body = json.dumps(REQUEST).encode()
        head = b"POST /v1/sandboxes HTTP/1.1\r\nAccept: application/x-ndjson\r\nContent-Type: application/json\r\n"
        stuck.send(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        assert service.entered.acquire(timeout=20)  # behind the steps
        until(lambda: not server._connections)
        assert service.calls[-1][0] == "remove"
        assert service.made == {}


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
def test_sandboxes_whose_maker_has_gone_are_removed_again(accept: str, tmp_path: Path) -> None:
    with serving(tmp_path) as (service, server):
        service.may_go_on.clear()
        with talking(tmp_path) as talk:
            body = json.dumps({**REQUEST, "id": "a", "count": 3}).encode()
            head = f"POST /v1/sandboxes HTTP/1.1\r\nAccept: {accept}\r\nContent-Type: application/json\r\n".encode()
            talk.send(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            assert service.entered.acquire(timeout=20)
        service.may_go_on.set()
        until(lambda: not server._connections)
        assert service.calls[-1] == ("remove", ["a-1", "a-2", "a-3"])
        assert service.made == {}


def test_every_request_is_counted_by_its_route(tmp_path: Path) -> None:
    seen: list[tuple[str, str, int]] = []
    with serving(tmp_path, observe=lambda m, r, s, seconds: seen.append((m, r, s))), talking(tmp_path) as talk:
        talk.ask("GET", "/v1/sandboxes/abc")
        talk.ask("POST", "/v1/sandboxes", REQUEST)
        talk.ask("GET", "/etc/passwd")
        talk.ask("BREW", "/v1/sandboxes")
        talk.ask("GET", "/v1/sandboxes/%00")
        talk.send(b"\r\n")
        assert talk.has_ended()
        until(lambda: len(seen) == 6)
    assert seen == [
        ("GET", "/v1/sandboxes/{id}", 404),
        ("POST", "/v1/sandboxes", 200),
        ("other", "other", 404),
        ("other", "other", 405),
        ("other", "other", 400),
        ("other", "other", 400),
    ]


def test_no_two_routes_are_the_same() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
