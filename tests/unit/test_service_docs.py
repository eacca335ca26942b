"""docs/api.md: its examples run against a server, its tables have what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from support.http import talking
from support.service import FakeService, running
from support.tools import CHECKOUT

from layerstore.errors import NoSpaceError
from overlay.service import answers, place
from overlay.service.client import Client
from overlay.service.messages import INTERNAL, KINDS
from overlay.service.metrics import ALL
from overlay.service.request import SandboxRequest
from overlay.service.routes import ROUTES

DOCUMENT = CHECKOUT / "docs" / "api.md"
TEXT = DOCUMENT.read_text()
LINES = "application/x-ndjson"


@dataclass(frozen=True)
class Exchange:
    """A request of the document and the answer below it."""

    line: int
    method: str
    target: str
    headers: dict[str, str]
    body: str
    status: int
    media_type: str
    answer: str


def exchanges() -> Iterator[Exchange]:
    for block in re.finditer(r"^```http\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        request, _, answer = block[1].partition("\nHTTP/1.1 ")
        head, _, body = request.partition("\n\n")
        first, *more = head.strip().splitlines()
        method, target = first.split()
        said, _, content = answer.partition("\n\n")
        status, *headers = said.splitlines()
        given = dict(header.split(": ", 1) for header in headers)
        yield Exchange(
            TEXT.count("\n", 0, block.start()) + 2,
            method,
            target,
            dict(header.split(": ", 1) for header in more),
            body.strip(),
            int(status),
            given["Content-Type"],
            content,
        )


def fits(wanted: Any, got: Any) -> bool:
    """Whether ``got`` is what the document shows, where ``…`` in a text stands for any."""
    match wanted:
        case str():
            pattern = "".join(".*" if part == "…" else re.escape(part) for part in re.split("(…)", wanted))
            return isinstance(got, str) and re.fullmatch(pattern, got, re.DOTALL) is not None
        case dict():
            return isinstance(got, dict) and wanted.keys() == got.keys() and all(fits(wanted[k], got[k]) for k in got)
        case list():
            return isinstance(got, list) and len(got) == len(wanted) and all(map(fits, wanted, got))
        case _:
            return type(wanted) is type(got) and bool(wanted == got)


def test_the_examples_are_answered_as_the_document_says(tmp_path: Path) -> None:
    service = FakeService()
    count = 0
    with place.listen(str(tmp_path)) as listening, running(service, listening):
        service.on_stop = lambda: None  # more examples follow
        for exchange in exchanges():
            where = f"{DOCUMENT.name}:{exchange.line}: {exchange.method} {exchange.target}"
            in_lines = exchange.headers.get("Accept") == LINES
            if in_lines:
                service.steps = [("fetch", 450_000_000)]
                service.error = NoSpaceError("write pack: No space left on device; free space and run it again")
            with talking(tmp_path) as talk:
                headers = {name.replace("-", "_"): value for name, value in exchange.headers.items()}
                answer = talk.ask(exchange.method, exchange.target, exchange.body.encode() or None, **headers)
            assert (answer.status, answer.headers["Content-Type"]) == (exchange.status, exchange.media_type), where
            if in_lines:
                shown = [json.loads(line) for line in exchange.answer.splitlines()]
                *got, last = [json.loads(line) for line in answer.body.splitlines()]
                assert last == shown[-1], where
                assert got, where
                assert {"progress": {**got[0]["progress"], "done": 0}} == shown[0], where
            else:
                assert fits(json.loads(exchange.answer), answer.json), f"{where}\n{answer.body.decode()}"
            count += 1
    assert count > 12


def test_the_python_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    with place.listen(str(tmp_path)) as listening, running(FakeService(), listening):
        there = example.replace('Client("/var/lib/imgtool")', f'Client.at("{tmp_path / place.SOCKET}")')
        assert there != example
        exec(compile(there, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out == "000000000001 ok\n000000000002 ok\n2 removed\n"


def section(title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> list[list[str]]:
    """The rows of the section's first table."""
    _, _, table = section(title).partition("| ---")
    lines = table.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def keys(title: str) -> set[str]:
    return {key for row in rows(title) for key in re.findall(r"`([a-z_]+)`", row[0])}


def test_every_endpoint_is_in_the_table() -> None:
    listed = [(row[0], row[1].strip("`")) for row in rows("Endpoints")]
    assert listed == [(route.method, route.path) for route in ROUTES]


def test_every_kind_of_error_is_in_the_table() -> None:
    listed = {(row[0].strip("`"), int(row[1])) for row in rows("Errors")}
    assert listed == {(kind.name, kind.status) for kind in KINDS} | {(INTERNAL, 500)}


def test_every_metric_is_in_the_table() -> None:
    listed = [
        (row[0].strip("`"), row[1], tuple(re.findall(r"`(\w+)`", row[2])), row[3] + ".") for row in rows("Metrics")
    ]
    assert listed == [
        (metric.name + ("_total" if metric.kind == "counter" else ""), metric.kind, metric.labels, metric.help)
        for metric in ALL
    ]


def test_every_metric_that_is_mentioned_exists() -> None:
    known = {metric.name + ("_total" if metric.kind == "counter" else "") for metric in ALL}
    assert set(re.findall(r"`(imgtool_\w+)`", TEXT)) <= known


def test_every_key_of_a_request_is_in_the_table() -> None:
    assert keys("Making sandboxes") == set(SandboxRequest.__dataclass_fields__)


def test_every_key_of_an_answer_is_in_its_table() -> None:
    service = FakeService()
    request = SandboxRequest(base="b", store="/store", id="a")
    [sandbox] = service.create(request, Client.create.__defaults__[0])  # type: ignore[index]
    assert keys("sandbox") == set(sandbox) | {"run"}
    assert keys("status") == set(service.status())
    assert keys("removal") == set(service.remove(["a"])[0])
    assert keys("pin") == set(service.pin("x", "/store"))
    assert keys("cache") == set(service.cache())


@pytest.mark.parametrize(
    ("made", "title"),
    [
        (answers.SandboxInfo, "sandbox"),
        (answers.RemovalInfo, "removal"),
        (answers.PinInfo, "pin"),
        (answers.CacheInfo, "cache"),
    ],
)
def test_the_clients_values_have_names_of_the_document(made: Any, title: str) -> None:
    assert {field.name for field in fields(made)} - {"raw"} <= keys(title)
