"""The log: lines that programs and people can read, and that never hold anybody up."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.service import logged
from support.tools import CHECKOUT

from layerstore.errors import ConflictError, NotFoundError
from overlay.service import log as logging_of_node
from overlay.service.log import MAX_LINE, MAX_TEXT, configure, descriptors, log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with logged():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    configure("worker", to=str(path), level="debug")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_says_when_who_and_what(file: Path) -> None:
    before = datetime.now(UTC)
    log("sandbox made", sandbox="a", layers=3, seconds=0.123456789, ok=True, upper=None)
    [line] = lines(file)
    when = datetime.fromisoformat(line.pop("ts"))
    assert abs((when - before).total_seconds()) < 60
    assert when.tzinfo is not None
    assert line == {
        "level": "info",
        "process": "worker",
        "event": "sandbox made",
        "sandbox": "a",
        "layers": 3,
        "seconds": 0.123457,
        "ok": True,
        "upper": None,
    }
    assert file.read_text()[:34].endswith('Z",')  # RFC 3339 with milliseconds
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("least", "seen"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels_can_be_left_out(least: str, seen: int, tmp_path: Path) -> None:
    configure("holder", to=str(tmp_path / "log"), level=least)
    for level in ("debug", "info", "warning", "error"):
        log("x", level=level)
    assert [line["level"] for line in lines(tmp_path / "log")] == ["debug", "info", "warning", "error"][-seen:]


class Odd:
    """A value that can't even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_any_value_becomes_bounded_printable_json(file: Path) -> None:
    nested: list[Any] = []
    nested.append(nested)
    log(
        "x" * 9000 + "\n",
        text="a\nb\x1b[31m\u2028" + "x" * 9000,
        bytes=b"\xff\x00",
        surrogate="\udcff",
        number=1 << 200,
        nan=float("nan"),
        infinite=float("inf"),
        array=list(range(100)),
        mapping={"a\n": {"b": {"c": {"d": 1}}}},
        nested=nested,
        error=ConflictError("taken"),
        ts="mine",
        process="keeper",
        level_="other",
    )
    [line] = lines(file)
    assert len(file.read_bytes()) <= MAX_LINE
    assert len(line["event"]) == MAX_TEXT
    assert line["text"].startswith("a?b?[31m?xx")
    assert len(line["text"]) == MAX_TEXT
    assert line["bytes"] == "\\xff\\x00"
    assert line["surrogate"] == "?"
    assert (line["number"], line["nan"], line["infinite"]) == ("an integer out of range", "nan", "inf")
    assert line["array"] == list(range(16))
    assert line["mapping"]["a?"] == {"b": "{'c': {'d': 1}}"}
    assert line["error"] == "ConflictError: taken"
    assert (line["process"], line["process_"], line["ts_"]) == ("worker", "keeper", "mine")


def test_nothing_is_raised(file: Path) -> None:
    log("odd", value=Odd())
    log("odd level", level="loud")
    log("many", **{f"key{number}": number for number in range(1000)})
    log("after")
    assert [line["event"] for line in lines(file)] == ["odd level", "many", "after"]
    assert lines(file)[0]["level"] == "error"
    assert len(lines(file)[1]) == 4 + 32


def test_a_line_that_is_too_long_loses_its_longest_fields(file: Path) -> None:
    log("long", short=1, **{f"text{number}": "é" * (300 + number) for number in range(20)})
    [line] = lines(file)
    assert len(file.read_bytes()) <= MAX_LINE
    assert (line["short"], line["cut"]) == (1, True)
    assert "text0" in line
    assert "text19" not in line


def test_an_exception_comes_with_the_end_of_its_traceback(file: Path) -> None:
    def deep(count: int) -> None:
        if count:
            deep(count - 1)
        raise ValueError("the\nreason")

    try:
        deep(100)
    except ValueError as error:
        log("failed", level="error", exception=error)
    [line] = lines(file)
    assert line["error"] == "ValueError: the?reason"
    assert "in deep" in line["traceback"]
    assert line["traceback"].endswith("reason")


def test_text_is_for_people(tmp_path: Path) -> None:
    configure("keeper", to=str(tmp_path / "log"), format="text")
    log("frame denied", pack="ab12", why="no such\nthing", count=3, empty="", quoted='a"b')
    text = (tmp_path / "log").read_text()
    assert text.partition(" ")[2] == (
        'info    keeper frame denied pack=ab12 why="no such?thing" count=3 empty="" quoted="a\\"b"\n'
    )


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    configure("holder", to=str(path))
    log("one")
    child = os.fork()
    if child == 0:
        configure("worker", to=str(path))
        for number in range(200):
            log("child", number=number)
        os._exit(0)
    for number in range(200):
        log("parent", number=number)
    assert os.waitpid(child, 0)[1] == 0
    assert len(lines(path)) == 401
    assert {line["process"] for line in lines(path)} == {"holder", "worker"}


def test_standard_error_is_written_to_and_stays_open(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    configure("holder")
    log("one")
    assert descriptors() == (sys.stderr.fileno(),)
    configure("holder", to=str(tmp_path / "log"))
    assert json.loads(capfd.readouterr().err)["event"] == "one"
    os.fstat(sys.stderr.fileno())
    assert len(descriptors()) == 1
    assert not os.get_inheritable(descriptors()[0])


def test_a_log_that_cant_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="open log"):
        configure("holder", to=str(tmp_path / "nothing/log"))


def test_until_it_is_configured_nothing_is_printed() -> None:
    script = "from overlay.service.log import log; log('x', level='error'); log('y')"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=CHECKOUT)
    assert (ran.stdout, ran.stderr) == (b"", b"")


def test_a_pipe_that_nobody_reads_drops_lines_and_says_so_later() -> None:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        handler = logging_of_node.LineHandler(writing, owned=True, render=logging_of_node._as_json, process="worker")
        logging_of_node.send_to(handler)
        done = threading.Event()

        def much() -> None:
            for number in range(2000):
                log("much", number=number, text="x" * 200)
            done.set()

        threading.Thread(target=much, daemon=True).start()
        assert done.wait(60)  # the first that finds no room waits a moment, the others don't
        content = b""
        while not content.endswith(b"\n") or len(content) < 30_000:
            content += os.read(reading, 1 << 20)
        log("after")
        content += os.read(reading, 1 << 20)
        found = [json.loads(line) for line in content.splitlines()]
        dropped = [line for line in found if line["event"] == "log lines dropped"]
        written = [line for line in found if line["event"] == "much"]
        assert found[-1]["event"] == "after"
        assert sum(line["count"] for line in dropped) + len(written) == 2000
        assert 0 < len(written) < 2000
    finally:
        os.close(reading)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EPIPE])
def test_a_disk_that_takes_nothing_drops_lines(error: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write(fd: int, data: bytes) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(logging_of_node.os, "write", write)
    for _ in range(3):
        log("lost")
    monkeypatch.setattr(logging_of_node.os, "write", real)
    log("kept")
    assert [(line["event"], line.get("count")) for line in lines(file)] == [("log lines dropped", 3), ("kept", None)]


def test_a_line_that_is_written_in_part_spoils_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(logging_of_node.os, "write", lambda fd, data: real(fd, data[:10]))
    log("torn")
    monkeypatch.setattr(logging_of_node.os, "write", real)
    log("whole")
    torn, *rest = file.read_bytes().splitlines()
    assert len(torn) == 10
    assert [json.loads(line)["event"] for line in rest] == ["log lines dropped", "whole"]
