"""The description of the formats against the code: sizes, offsets, names and values."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import struct
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support.receipts import RECEIPT
from support.tools import CHECKOUT

from layerstore.cache import format as cache_format
from layerstore.digest import Digest
from layerstore.erofs import format as erofs_format
from layerstore.oci.descriptor import Descriptor
from layerstore.pack import format as pack_format
from layerstore.store.format import LeaseDocument, ReferenceDocument, StoreMarker
from overlay.format import SandboxState, chain_of
from overlay.service.receipt import REASONS, Read, Reason, Verification
from overlay.service.written import Written

TEXT = (CHECKOUT / "docs" / "formats.md").read_text()
TABLE = re.compile(r"((?:^[^|\n].*\n)?)\n\| ([^\n]+) \|\n\| ---[^\n]*\n((?:\|[^\n]*\n)+)", re.MULTILINE)
MODULES: list[ModuleType] = [
    importlib.import_module(name)
    for name in (
        "layerstore.version",
        "layerstore.store.format",
        "layerstore.image",
        "layerstore.pack.stored",
        "layerstore.pack.format",
        "layerstore.pack.chunks",
        "layerstore.erofs.format",
        "layerstore.cache.format",
        "overlay.format",
        "overlay.service.receipt",
    )
]


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in re.split(r" \|(?: |$)", line[2:])] for line in table.splitlines()]


def tables(first: str) -> Iterator[tuple[str, str, list[list[str]]]]:
    """(heading above, the section's module, rows) of the tables whose first column has this name."""
    for found in TABLE.finditer(TEXT):
        if found[2].split(" | ")[0].strip() == first:
            named = re.findall(r"^`((?:layerstore|overlay)[a-z.]*)`", TEXT[: found.start(2)], re.MULTILINE)
            yield found[1].strip(), named[-1], rows(found[3])


def fields_of(layout: struct.Struct) -> list[tuple[int, int]]:
    """Offset and size of each value of a little-endian struct."""
    fields = []
    offset = 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        size = struct.calcsize("<" + code)
        repeat = int(count or 1)
        if code == "s":
            fields.append((offset, repeat))
        elif code != "x":
            fields += [(offset + number * size, size) for number in range(repeat)]
        offset += repeat * size
    assert offset == layout.size
    return fields


RECORDS = {heading: table for heading, _, table in tables("offset")}


@pytest.mark.parametrize("heading", RECORDS, ids=lambda heading: heading.split("`")[1])
def test_records_are_those_of_the_code(heading: str) -> None:
    match = re.match(r"`(\w+)`: (\d+) bytes", heading)
    assert match, heading
    [record] = [getattr(module, match[1]) for module in MODULES if hasattr(module, match[1])][:1]
    layout: struct.Struct = record.STRUCT
    assert layout.size == int(match[2])
    table = RECORDS[heading]
    assert [(int(offset), int(size)) for offset, size, *_ in table] == fields_of(layout)
    named = [row[2] for row in table if not row[2].startswith("(")]
    own = [field.name for field in dataclasses.fields(record)]
    assert sorted(named) == sorted(own)


def test_every_record_of_ours_is_described() -> None:
    described = {heading.split("`")[1] for heading in RECORDS}
    ours = {
        name
        for module in (pack_format, erofs_format, cache_format)
        for name, value in vars(module).items()
        if isinstance(getattr(value, "STRUCT", None), struct.Struct)
    }
    assert described == ours - {"InodeCompact"}, "compact inodes are read and never written"


CONSTANTS = [(module, name.strip("`"), value) for _, module, table in tables("constant") for name, value, *_ in table]


@pytest.mark.parametrize(("module", "name", "value"), CONSTANTS, ids=[f"{m}.{n}" for m, n, _ in CONSTANTS])
def test_constants_are_those_of_the_code(module: str, name: str, value: str) -> None:
    found: list[Any] = []
    for candidate in MODULES:
        if candidate.__name__.startswith(module):
            here: Any = candidate
            for part in name.split("."):
                here = getattr(here, part, None)
            if here is not None:
                found.append(here)
    if not found:
        found = [getattr(candidate, name) for candidate in MODULES if hasattr(candidate, name)]
    assert found[0] == ast.literal_eval(value.strip("`"))


def test_magic_and_version_of_every_format_are_described() -> None:
    described = {name for _, name, _ in CONSTANTS}
    for module in (pack_format, cache_format):
        for name in vars(module):
            if name.isupper() and name.endswith(("MAGIC", "VERSION", "INCOMPATIBLE")):
                assert name in described, f"{module.__name__}.{name}"


def documented_fields(after: str) -> set[str]:
    """The fields of the first table of fields behind some text."""
    at = TEXT.index(after)
    table = re.compile(r"^\| field \| \|\n\| ---[^\n]*\n((?:\|[^\n]*\n)+)", re.MULTILINE).search(TEXT, at)
    assert table
    return {name for row in rows(table[1]) for name in re.findall(r"`([a-z_]+)`", row[0])}


def test_documents_of_a_store_have_the_fields_described() -> None:
    common = documented_fields("Each document is one JSON object")
    target = Descriptor("application/vnd.oci.image.manifest.v1+json", Digest.of(b""), 0)
    assert set(json.loads(StoreMarker().to_bytes())) == common
    assert set(json.loads(ReferenceDocument("a", target).to_bytes())) == common | {"name", "target"}
    assert set(json.loads(LeaseDocument("x", 1).to_bytes())) == common | {"id", "expires", "pins"}
    for field in ("name", "target", "id", "expires", "pins"):
        assert f"`{field}`" in TEXT


def test_documents_of_the_cache_have_the_fields_described() -> None:
    common = {"magic", "version"}
    documents = (cache_format.dump_origins([]), cache_format.dump_pins({}), cache_format.dump_clean([]))
    written = common.union(*(json.loads(document) for document in documents))
    assert documented_fields("The others are one JSON object each") == written | {"packs"}, "packs: of <hex>.uses"


def test_the_state_of_a_sandbox_has_the_fields_described() -> None:
    layers = ("a" * 64,)
    state = SandboxState("box", 1, "boot", "eager", False, None, layers, chain_of(layers), {}, {})
    assert set(json.loads(state.to_bytes())) == documented_fields("state.json` says what a sandbox is made of")


def test_a_receipt_has_the_fields_described() -> None:
    assert set(RECEIPT.to_json()) == documented_fields("says what a sandbox was made of")
    ended = RECEIPT.ending(Reason.DOWN, read=Read(), wrote=Written(0, 0, 0, 0)).end
    assert ended is not None
    table = TEXT.partition("| field of `end` | |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    described = {row[0].strip("`"): row[1] for row in rows("\n".join(table))}
    document = ended.to_json()
    assert set(described) == set(document)
    for part in ("read", "wrote"):
        fields = document[part]
        assert isinstance(fields, dict)
        assert set(re.findall(r"`([a-z_]+)`", described[part])) == set(fields)
    assert re.findall(r"(?:^|[,;] )([a-z]+)", re.sub(r" \(.*?\)", "", described["reason"])) == [str(r) for r in REASONS]


def test_every_word_of_verification_is_described() -> None:
    table = TEXT.partition("| verification | what it means |\n| --- | --- |\n")[2].partition("\n\n")[0]
    assert [row[0].strip("`") for row in rows(table)] == [str(word) for word in Verification]


def test_annotations_of_a_layer_are_all_described() -> None:
    stored = importlib.import_module("layerstore.pack.stored")
    image = importlib.import_module("layerstore.image")
    written = {
        value
        for module in (stored, image)
        for value in vars(module).values()
        if isinstance(value, str) and value.startswith(("org.erofs.", "org.imgtool."))
    }
    described = {ast.literal_eval(value.strip("`")) for _, _, value in CONSTANTS if value.startswith('`"org.')}
    assert described == written
