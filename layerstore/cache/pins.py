"""Pins: names under which packs and metadata images are kept from eviction, whoever uses them or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from layerstore.cache.format import PINS_BYTES, dump_pins, is_hex, parse_pins
from layerstore.errors import CorruptError, LimitError, MalformedError, NotFoundError, UsageError, os_errors, printable
from layerstore.staging import read_file, write_file

MAX_NAME = 1024
"""Characters; names of images fit."""


class Pins:
    """``pins.json`` of a cache. For one thread at a time."""

    def __init__(self, path: str) -> None:
        """Read what is pinned.

        Raises:
            CorruptError: the file is damaged.
            UnsupportedError: it is of another version.
        """
        self._path = path
        self._pins: dict[str, list[str]] = {}
        try:
            with os_errors("read pins"):
                self._pins = parse_pins(read_file(path, PINS_BYTES))
        except NotFoundError:
            pass
        except (MalformedError, LimitError) as error:
            raise CorruptError(f"{printable(path)}: {error}; remove it, and pin again what is to stay") from error
        self._count()

    def pin(self, name: str, hexes: Iterable[str]) -> None:
        """Keep these, and what ``name`` stood for before no more; durable on return.

        Raises:
            UsageError: no name, or no hex of a sha256.
            NoSpaceError: nothing has changed.
        """
        listed = list(dict.fromkeys(hexes))
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise UsageError(f"not a name for a pin: {printable(name[:MAX_NAME])!r}")
        if not all(map(is_hex, listed)):
            raise UsageError(f"pin {printable(name)!r}: not all are the hex of a sha256")
        self._replace({**self._pins, name: listed})

    def unpin(self, name: str) -> bool:
        """Keep no longer what a name stands for; False if it stands for nothing."""
        if name not in self._pins:
            return False
        self._replace({other: hexes for other, hexes in self._pins.items() if other != name})
        return True

    def pinned(self) -> frozenset[str]:
        return self._pinned

    def all(self) -> Mapping[str, list[str]]:
        """A copy."""
        return {name: list(hexes) for name, hexes in self._pins.items()}

    def _replace(self, pins: dict[str, list[str]]) -> None:
        with os_errors("write pins"):
            write_file(self._path, dump_pins(pins))
        self._pins = pins
        self._count()

    def _count(self) -> None:
        self._pinned = frozenset(hex for hexes in self._pins.values() for hex in hexes)
