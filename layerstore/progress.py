"""How the library tells what it is doing; the command line draws it, tests and services may count it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told from any thread. ``start`` begins a step; ``advance`` adds to it."""

    def start(self, step: str, total: int | None) -> None:
        """A step of ``total`` bytes (None: unknown) begins; the one before has ended."""
        ...

    def advance(self, count: int) -> None: ...


class Silent:
    """Tells nobody."""

    def start(self, step: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


SILENT: Progress = Silent()
