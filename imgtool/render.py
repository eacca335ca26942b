"""Output: JSON for scripts, tables for people. The only module that prints results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(count: int) -> str:
    """Bytes for people, in powers of 1000 as disks and links are sold."""
    value = float(count)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def span(seconds: float) -> str:
    """A time in one unit, the largest of which there are two."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.0f}s"


def print_json(document: object) -> None:
    """One JSON document; keys in the order given."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=True))


def print_line(text: str) -> None:
    click.echo(text)


def warn(text: str) -> None:
    """A warning, on standard error."""
    click.echo(f"imgtool: warning: {text}", err=True)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> None:
    """Columns under headings; columns in ``right`` are numbers. Never cut where the output is no terminal."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        widest = sum(max(map(cell_len, column)) for column in zip(headings, *rows, strict=True))
        console = Console(file=sys.stdout, highlight=False, width=widest + 2 * len(headings))
    console.print(table)
