"""Sandboxes by description: the file that ``up -f`` takes, YAML or JSON.

``sandbox.schema.json`` beside this module says what is ours; ``docs/cli.md`` explains it. A description is written by
a platform for all of its parts, so fields that are not ours are no mistake: they are carried into the receipt and named
there. A field that looks like one of ours misspelt is refused, since to carry it would be to ignore what it asks for.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import fastjsonschema

from layerstore.errors import MalformedError, UnsupportedError, UsageError, about, printable
from layerstore.oci.document import kind_of, parse_value, shown
from overlay.service.duration import parse_duration
from overlay.service.fields import nearest
from overlay.service.receipt import not_ours
from overlay.service.request import SandboxRequest
from overlay.service.yaml_document import MAX_SIZE, load

SCHEMA = os.path.join(os.path.dirname(__file__), "sandbox.schema.json")

_ALIKE = 0.85
"""Likeness (difflib) from which a field of the top counts as a misspelt one of ours: `lifecyle`, but not `storage`."""
_ALIKE_BELOW = 0.75
"""The same in `resources`, of which fewer fields are ours and none is a common word: `scratch_gb`, `readonly`."""
_SHORTEST = 5
"""Shorter names of ours are too like others to tell (`mode`, `model`)."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a file asks for.

    Attributes:
        what: the file, for messages.
        fields: of a :class:`SandboxRequest`, those that the file gives.
        not_ours: where the fields stood that are only carried.
    """

    what: str
    fields: Mapping[str, object]
    not_ours: tuple[str, ...]

    def request(self, store: str, overrides: Mapping[str, object] | None = None) -> SandboxRequest:
        """The request.

        Args:
            store: location, if the file names none.
            overrides: fields that count more than the file's.

        Raises:
            UsageError: fields that contradict each other.
        """
        with about(self.what):
            return SandboxRequest.from_json({"store": store, **self.fields, **(overrides or {})})


def parse(text: bytes, what: str) -> Description:
    """Read a description; ``what`` names it in messages.

    Raises:
        LimitError: too large.
        MalformedError: neither YAML nor JSON, or ambiguous: a key twice, several documents.
        UsageError: a field is missing, misspelt, of a wrong type or out of its range; the message names it.
        UnsupportedError: something that this release doesn't do.
    """
    document = _read(text, what)
    if not isinstance(document, dict):
        raise UsageError(f"{what} is {kind_of(document)} where a mapping with `image` in it belongs")
    _refuse_misspelt(document, what)
    try:
        _validator()(document)
    except fastjsonschema.JsonSchemaValueException as error:
        raise UsageError(f"{what}: {_explained(error)}") from None
    return _described(document, what)


def _read(text: bytes, what: str) -> object:
    """JSON where it is that: its escapes of surrogate pairs are beyond YAML's, and it needs no scanner."""
    if text.lstrip()[:1] == b"{":
        try:
            return parse_value(text, what, limit=MAX_SIZE)
        except MalformedError:
            pass  # a flow mapping of YAML, or broken: then YAML's message has the line
    return load(text, what)


def _described(document: Mapping[str, Any], what: str) -> Description:
    if document.get("isolation") == "microvm":
        raise UnsupportedError(
            f"{what}: isolation microvm needs a disk for its guest, which this release doesn't make; "
            "ask for container or none"
        )
    image = document["image"]
    layers = {"base": image} if isinstance(image, str) else image
    toolkit = layers.get("toolkit", [])
    resources, lifecycle = document.get("resources", {}), document.get("lifecycle", {})
    prefetch = document.get("prefetch", {})
    fields: dict[str, object] = {
        "base": layers["base"],
        "workspace": layers.get("workspace"),
        "toolkits": [toolkit] if isinstance(toolkit, str) else toolkit,
        "force": layers.get("force"),
        "id": _either(document, "id", "name", what),
        "read_only": resources.get("read_only"),
        "ttl": _ttl(lifecycle, what),
        "plan": prefetch.get("plan"),
        "wait_prefetch": prefetch.get("wait"),
        "record": _record(prefetch.get("record", False)),
    }
    fields |= {key: document.get(key) for key in ("isolation", "mode", "backend", "store", "count", "receipts")}
    if "scratch_gib" in resources:
        fields["scratch"] = max(1, round(resources["scratch_gib"] * (1 << 30)))
    carried = _carried(document)
    if carried:
        fields["carried"] = carried
    return Description(what, {k: v for k, v in fields.items() if v not in (None, [])}, tuple(not_ours(carried)))


def _carried(document: Mapping[str, Any]) -> dict[str, object]:
    ours = _properties()
    carried = {key: value for key, value in document.items() if key not in ours}
    below = {key: value for key, value in document.get("resources", {}).items() if key not in _properties("resources")}
    if below:
        carried["resources"] = below
    return carried


def _either(section: Mapping[str, Any], one: str, other: str, what: str) -> Any:
    if one in section and other in section:
        raise UsageError(f"{what}: {one} and {other} are two words for one field; give one of them")
    return section.get(one, section.get(other))


def _record(value: bool | str) -> Mapping[str, object] | None:
    return None if value is False else {"name": None if value is True else value}


def _ttl(lifecycle: Mapping[str, Any], what: str) -> float | None:
    value = _either(lifecycle, "ttl", "ttl_s", f"{what}: lifecycle")
    if not isinstance(value, str):
        return None if value is None else float(value)
    with about(f"{what}: lifecycle.ttl"):
        return parse_duration(value)


def _refuse_misspelt(document: Mapping[str, object], what: str) -> None:
    ours = _properties()
    for key in document:
        if key not in ours:
            meant = difflib.get_close_matches(key[:100], [n for n in ours if len(n) >= _SHORTEST], 1, _ALIKE)
            if meant:
                raise UsageError(f"{what}: the field {shown(key)} looks like {meant[0]!r} misspelt")
    resources = document.get("resources")
    below = _properties("resources")
    for key in resources if isinstance(resources, dict) else ():
        if key not in below:
            meant = difflib.get_close_matches(key[:100], list(below), 1, _ALIKE_BELOW)
            if meant or key.startswith("scratch"):
                name = meant[0] if meant else "scratch_gib"
                raise UsageError(f"{what}: the field {shown('resources.' + key)} looks like {name!r} misspelt")


def _explained(error: fastjsonschema.JsonSchemaValueException) -> str:
    """One line: where, what is there, and what can be."""
    # The first part is the library's word for all of it; the others are texts, those of positions too.
    where = "".join(f"[{part}]" if str(part).isdecimal() else f".{part}" for part in error.path[1:])[1:]
    where = printable(where) or "the description"
    value, wanted = error.value, error.rule_definition
    match error.rule:
        case "required":
            lacking = next(name for name in wanted if name not in value)
            hint = "; its fields stand at the top, not under `spec`" if "spec" in value and lacking == "image" else ""
            return f"{where} lacks the field {lacking!r}{hint}"
        case "additionalProperties":
            known = error.definition["properties"]
            unknown = next(name for name in value if name not in known)
            return f"{where} has no field {shown(unknown)}{nearest(unknown, list(known))}"
        case "enum":
            return f"{where} is {_shown(value)}; it can be {', '.join(wanted)}"
        case "type":
            kinds = " or ".join(_KINDS[kind] for kind in ([wanted] if isinstance(wanted, str) else wanted))
            quote = "; quote it" if kinds == "a string" and isinstance(value, bool | int | float) else ""
            return f"{where} is {kind_of(value)} where {kinds} belongs{quote}"
        case "pattern":
            return f"{where} is {_shown(value)}, which {_PATTERNS[wanted]}"
        case "minLength":
            return f"{where} is empty"
        case "maxLength" | "maxItems":
            return f"{where} has {len(value)} {'characters' if isinstance(value, str) else 'items'}; at most {wanted}"
        case "minimum":
            return f"{where} is {_shown(value)}; it can be {wanted} or more"
        case "exclusiveMinimum":
            return f"{where} is {_shown(value)}; it has to be above {wanted}"
        case "maximum":
            return f"{where} is {_shown(value)}; it can be up to {wanted}"
    return f"{where} is not as the schema says ({error.rule})"


_KINDS = {
    "string": "a string",
    "object": "a mapping",
    "array": "a list",
    "number": "a number",
    "integer": "an integer",
    "boolean": "true or false",
}
_PATTERNS = {
    "^/": "has to be an absolute path",
    "^(/|[A-Za-z][A-Za-z0-9+.-]*://)": "has to be an absolute path or a URL",
    "^([^/]+/)?v1$": "is not version v1, the one that this release reads",
    "^[A-Za-z0-9][A-Za-z0-9._:-]*$": "is no name of a file: letters, digits and . _ - :, first a letter or digit",
    "^[a-z0-9][a-z0-9._-]{0,62}$": ("is no id: 1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit"),
}


def _shown(value: object) -> str:
    if isinstance(value, str):
        return shown(value, 60)
    if isinstance(value, bool | int | float):
        return json.dumps(value)[:60]
    return kind_of(value)


@cache
def _schema() -> dict[str, Any]:
    with open(SCHEMA, encoding="utf-8") as stream:
        schema: dict[str, Any] = json.load(stream)
    return schema


def _properties(section: str | None = None) -> Mapping[str, Any]:
    schema = _schema() if section is None else _schema()["properties"][section]
    properties: dict[str, Any] = schema["properties"]
    return properties


@cache
def _validator() -> Any:
    return fastjsonschema.compile(_schema())
