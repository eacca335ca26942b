"""YAML from anybody as the values that JSON has: no more than that can be said in a description.

The scanner is PyYAML's; what its events mean is decided here, with the core schema of YAML 1.2 (``yes``, ``on`` and
``010`` are not what YAML 1.1 makes of them) and these rules, each for a reason:

* one document; keys are strings, each once in a mapping: nobody can read another document into the same bytes;
* no tags but ``!!str``: none constructs anything;
* aliases yes, but what they come to when they are written out is bounded, and no value contains itself;
* no merge keys (``<<``), no numbers that JSON lacks (infinity, not-a-number).
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from layerstore.errors import LimitError, MalformedError
from layerstore.oci.document import INTEGER_DIGITS, shown

MAX_SIZE = 1 << 20
"""Bytes of a document."""
MAX_WEIGHT = 2 << 20
"""Characters and values of a document with its aliases written out; without any it has fewer than MAX_SIZE."""
DEPTH = 64
"""Deepest nesting, as in OCI documents."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is 30 times as fast
_STRING_TAGS = ("!", "tag:yaml.org,2002:str")
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_JSON = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_ABSENT = object()


def load(data: bytes, what: str) -> object:
    """The value of the one document in ``data``; ``what`` names it in messages, which also give the line.

    Raises:
        LimitError: larger than MAX_SIZE, or than MAX_WEIGHT with its aliases written out.
        MalformedError: not UTF-8, not YAML, or against a rule above.
    """
    if len(data) > MAX_SIZE:
        raise LimitError(f"{what} has more than the limit of {MAX_SIZE} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedError(f"{what} is not UTF-8", offset=error.start) from None
    builder = _Builder(what)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise MalformedError(f"{what}{where}: not YAML: {_one_line(error.problem or error.context)}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a character that YAML doesn't allow; an escape
        raise MalformedError(f"{what}: not YAML: {_one_line(str(error))}") from None
    return builder.value


class _Open:
    """A sequence or mapping that is being read, and how much is in it."""

    __slots__ = ("anchor", "key", "keys", "value", "weight")

    def __init__(self, value: list[object] | dict[str, object], anchor: str | None) -> None:
        self.value = value
        self.anchor = anchor
        self.weight = 1
        self.key: object = _ABSENT


class _Builder:
    """Makes the value out of events, with a stack of its own: nesting is bounded here, not by Python's."""

    def __init__(self, what: str) -> None:
        self.value: object = None
        self._what = what
        self._documents = 0
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[object, int]] = {}
        self._line = 0

    def take(self, event: Any) -> None:
        self._line = event.start_mark.line + 1
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._refused("a second document; one file has one")
            case yaml.ScalarEvent():
                value = self._scalar(event)
                weight = 1 + len(event.value)
                self._remember(event.anchor, value, weight)
                self._add(value, weight)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                if event.tag is not None:
                    raise self._refused(f"the tag {shown(event.tag)}; values are plain")
                if len(self._open) >= DEPTH:
                    raise self._refused(f"nested more than {DEPTH} deep")
                if event.anchor is not None:  # until it ends, an alias to it would be a value that contains itself
                    self._anchors.pop(event.anchor, None)
                self._open.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], event.anchor))
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                done = self._open.pop()
                self._remember(done.anchor, done.value, done.weight)
                self._add(done.value, done.weight)
            case yaml.AliasEvent():
                if event.anchor not in self._anchors:
                    raise self._refused(f"the alias {shown(str(event.anchor))} stands for nothing that is complete")
                self._add(*self._anchors[event.anchor])

    def _remember(self, anchor: str | None, value: object, weight: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = value, weight

    def _add(self, value: object, weight: int) -> None:
        """Put a complete value where it belongs; ``weight`` counts as often as the value is referred to."""
        if not self._open:
            self.value = value
            return
        parent = self._open[-1]
        parent.weight += weight
        if parent.weight > MAX_WEIGHT:
            raise LimitError(f"{self._what}, line {self._line}: its aliases come to more than {MAX_WEIGHT} characters")
        if isinstance(parent.value, list):
            parent.value.append(value)
        elif parent.key is _ABSENT:
            parent.key = self._key(value, parent.value)
        else:
            parent.value[str(parent.key)] = value
            parent.key = _ABSENT

    def _key(self, value: object, mapping: dict[str, object]) -> str:
        if not isinstance(value, str):
            raise self._refused("a key that is not a string; quote it")
        if value == "<<":
            raise self._refused("a merge key (<<); write the fields out")
        if value in mapping:
            raise self._refused(f"the key {shown(value)} a second time")
        return value

    def _scalar(self, event: Any) -> object:
        if event.tag is not None and event.tag not in _STRING_TAGS:
            raise self._refused(f"the tag {shown(event.tag)}; values are plain")
        text: str = event.value
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise self._refused("a string with half of a surrogate pair") from None
        if event.tag is not None or not event.implicit[0]:  # quoted, or said to be a string
            return text
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _INT.fullmatch(text) or _PREFIXED.fullmatch(text):
            if len(text) > INTEGER_DIGITS:
                raise self._refused(f"an integer of {len(text)} digits")
            return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
        if _FLOAT.fullmatch(text):
            number = float(text)
            if math.isfinite(number):
                return number
        elif not _NOT_JSON.fullmatch(text):
            return text
        raise self._refused(f"the number {shown(text, 40)}, which JSON can't have")

    def _refused(self, found: str) -> MalformedError:
        return MalformedError(f"{self._what}, line {self._line}: {found}")


def _one_line(text: str | None) -> str:
    return " ".join((text or "broken").split())
