"""Typed values out of JSON objects from outside, strictly: what is unknown, missing or of another type is refused.

Every refusal is a UsageError of one line: which document, which field, what it is and what belongs there.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import TypeVar

from layerstore.errors import UsageError
from layerstore.oci.document import kind_of, shown

T = TypeVar("T")


class Fields:
    """One object. A field that is absent or null takes its default; one without a default has to be there."""

    def __init__(self, document: object, what: str, known: Collection[str]) -> None:
        if not isinstance(document, dict):
            raise UsageError(f"{what} is {kind_of(document)} where an object belongs")
        self._document: Mapping[object, object] = document
        self._what = what
        for key in document:
            if key not in known:
                raise UsageError(f"{what} has no field {shown(str(key))}{nearest(str(key), known)}")

    def text(self, key: str, *, limit: int) -> str:
        """A string that has to be there, of 1 to ``limit`` characters."""
        value = self.optional_text(key, limit=limit)
        if value is None:
            raise UsageError(f"{self._what} lacks the field {key!r}")
        return value

    def optional_text(self, key: str, *, limit: int) -> str | None:
        value = self._document.get(key)
        return None if value is None else self._text(value, key, limit)

    def texts(self, key: str, *, limit: int, count: int) -> tuple[str, ...]:
        """An array of at most ``count`` strings."""
        value = self._document.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self._wrong(key, value, "an array of strings")
        if len(value) > count:
            raise UsageError(f"{self._what}: {key} has {len(value)} items, more than the {count} that are taken")
        return tuple(self._text(item, f"{key}[{number}]", limit) for number, item in enumerate(value))

    def choice(self, key: str, allowed: Collection[str], default: str) -> str:
        value = self.optional_choice(key, allowed)
        return default if value is None else value

    def optional_choice(self, key: str, allowed: Collection[str]) -> str | None:
        value = self._document.get(key)
        if value is None or (isinstance(value, str) and value in allowed):
            return value
        got = shown(value) if isinstance(value, str) else kind_of(value)
        raise UsageError(f"{self._what}: {key} is {got}; it can be {', '.join(allowed)}")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._document.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def whole(self, key: str, default: T, *, least: int, most: int) -> int | T:
        """An integer from ``least`` to ``most``."""
        value = self._document.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        if not least <= value <= most:
            raise UsageError(f"{self._what}: {key} is {_number(value)}; it can be {least} to {most}")
        return value

    def seconds(self, key: str, default: T, *, most: float) -> float | T:
        """A number above 0 and at most ``most``."""
        value = self._document.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number of seconds")
        if not 0 < value <= most:  # a NaN is neither
            raise UsageError(f"{self._what}: {key} is {_number(value)}; it can be above 0 and up to {most:.0f} seconds")
        return float(value)

    def mapping(self, key: str) -> Mapping[str, object]:
        value = self._document.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise self._wrong(key, value, "an object")
        return value

    def optional_object(self, key: str) -> Mapping[str, object] | None:
        """An object, with whatever in it."""
        return None if self._document.get(key) is None else self.mapping(key)

    def items(self, key: str) -> list[object]:
        value = self._document.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(key, value, "an array")
        return value

    def _text(self, value: object, key: str, limit: int) -> str:
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        if not 0 < len(value) <= limit:
            raise UsageError(f"{self._what}: {key} has {len(value)} characters; it can have 1 to {limit}")
        if not is_name(value):
            raise UsageError(f"{self._what}: {key} is {shown(value)}, which holds a NUL or half of a surrogate pair")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> UsageError:
        return UsageError(f"{self._what}: {key} is {kind_of(value)} where {wanted} belongs")


def is_name(text: str) -> bool:
    """Whether the operating system can have it in a name: bytes behind every character, and no NUL."""
    if "\0" in text:
        return False
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def nearest(name: str, known: Collection[str]) -> str:
    """The end of a message about a name that isn't known: the one that was probably meant, or all there are."""
    close = difflib.get_close_matches(name[:100], known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(known)}" if known else ""


def _number(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "out of range"
    return f"{value}" if math.isfinite(value) else "no finite number"
