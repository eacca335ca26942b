"""Progress on a terminal: bytes, rate and time left. Elsewhere nothing is drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from layerstore.progress import SILENT, Progress

if TYPE_CHECKING:
    import rich.progress


class _Drawn:
    def __init__(self, bars: rich.progress.Progress) -> None:
        self._bars = bars
        self._task: rich.progress.TaskID | None = None

    def start(self, step: str, total: int | None) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(step, total=total)

    def advance(self, count: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, count)


@contextmanager
def shown(*, quiet: bool = False) -> Iterator[Progress]:
    """A progress that is drawn on standard error while the block runs, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield SILENT
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    bars = RichProgress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    with bars:
        yield _Drawn(bars)
