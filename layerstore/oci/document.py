"""Reading and writing the JSON of OCI documents.

Readers of one document have to see one thing (CVE-2021-41190), so what RFC 8259 leaves open is closed here: UTF-8
only, an object at the top, no NaN or Infinity, no number that becomes infinite, no half surrogate pairs, bounded
size and depth. Integers of any size are kept; a float stays a float, so that a size of ``1.5`` or ``1.0`` is refused
by whoever wants an integer.

Duplicate keys are refused in manifests and indexes, where they are an attack. In image configs they are sloppiness
that other tools accept: the last one wins, as in Go, and the caller hears of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

from layerstore.errors import LimitError, MalformedError, printable

MANIFEST_BYTES = 4 << 20
"""Largest manifest or index; distribution-spec 1.1 asks registries to take at least this much."""

CONFIG_BYTES = 16 << 20
"""Largest image config, and largest index.json of a layout, which may list thousands of tags."""

DEPTH = 64
"""Deepest nesting of arrays and objects; real documents have fewer than 10."""

VALUES = 1_000_000
"""Most values in a document: an empty array takes 2 bytes of JSON and 64 of memory."""

INTEGER_DIGITS = 400
"""Longest integer; Python itself refuses to convert more than 4,300 digits."""

Duplicate = Callable[[str], None]
"""Told the name of a key that occurs twice in one object."""


def parse(
    data: bytes, what: str, *, limit: int = MANIFEST_BYTES, duplicate: Duplicate | None = None
) -> dict[str, object]:
    """The JSON object in ``data``; ``what`` names the document in messages.

    Args:
        data: the whole document.
        what: such as ``manifest sha256:…``.
        limit: bytes.
        duplicate: called for each duplicate key, of which the last wins; without it duplicates are refused.

    Raises:
        LimitError: larger than ``limit``.
        MalformedError: anything else.
    """
    document = parse_value(data, what, limit=limit, duplicate=duplicate)
    if not isinstance(document, dict):
        raise MalformedError(f"{what} is {kind_of(document)} where an object belongs")
    return document


def parse_value(data: bytes, what: str, *, limit: int = MANIFEST_BYTES, duplicate: Duplicate | None = None) -> object:
    """As :func:`parse`, with any JSON value at the top."""
    if len(data) > limit:
        raise LimitError(f"{what} has {len(data)} bytes, more than the limit of {limit}")
    # Commas and brackets inside strings count too: an estimate from above that costs no parsing.
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > VALUES:
        raise LimitError(f"{what} has more than the limit of {VALUES} values")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"{what} is not UTF-8", offset=error.start) from error

    def object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
        document = dict(pairs)
        if len(document) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    if duplicate is None:
                        raise MalformedError(f"{what} has the key {shown(name)} twice in one object")
                    duplicate(shown(name))
                seen.add(name)
        return document

    decoder = json.JSONDecoder(
        object_pairs_hook=object_of, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
    )
    try:
        value: object = decoder.decode(text)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode("utf-8"))
        raise MalformedError(f"{what} is not JSON: {error.msg}", offset=offset) from error
    except ValueError as error:
        raise MalformedError(f"{what}: {error}") from error
    except RecursionError as error:
        raise MalformedError(f"{what} is nested too deeply") from error
    _check(value, what)
    return value


def dump(document: object) -> bytes:
    """Compact UTF-8 JSON; keys stay in the order they have, so equal documents built alike give equal bytes."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def refuse_disguises(document: Mapping[str, object], names: Iterable[str], what: str) -> None:
    """Refuse keys that differ from one of ``names`` in case alone.

    ``Layers`` is ``layers`` to a Go reader, which ignores case, and an unknown field to others: two documents in one.
    """
    known = {name.casefold(): name for name in names}
    for key in document:
        name = known.get(key.casefold(), key)
        if name != key:
            raise MalformedError(f"{what} is ambiguous: its key {shown(key)} can be read as {name!r}")


def kind_of(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    for types, name in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a fraction"),
        (str, "a string"),
        (list, "an array"),
    ):
        if isinstance(value, types):
            return name
    return "an object"


def shown(text: str, limit: int = 120) -> str:
    """A string from outside for a message: printable, quoted, never long."""
    start = text[:limit]
    name = printable(start)
    return f"'{name}'" if len(text) <= limit else f"'{name}…'"


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _integer(text: str) -> int:
    if len(text) > INTEGER_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits is out of range")
    return int(text)


def _check(value: object, what: str) -> None:
    """Depth, and no lone surrogates, which would be an encoding error wherever the text goes next."""
    level: list[object] = [value]
    depth = 0
    while level:
        depth += 1
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item, what)
            elif isinstance(item, (dict, list)):
                if depth > DEPTH:
                    raise MalformedError(f"{what} is nested more than {DEPTH} deep")
                if isinstance(item, dict):
                    for name in item:
                        _check_text(name, what)
                below.extend(item.values() if isinstance(item, dict) else item)
        level = below


def _check_text(text: str, what: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedError(f"{what} has a string with half of a surrogate pair") from error
