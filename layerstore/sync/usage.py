"""Which image how many tasks need: a table that somebody else writes.

CSV (RFC 4180) in UTF-8 with a line of headings. Columns, in any order: ``image``, a reference; ``tasks``, how many
tasks need it, or their weight; and, if it is there, ``eligible``: ``no`` keeps the image from leaving, ``yes`` or
nothing doesn't. Other columns mean nothing here.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass

from layerstore.errors import LimitError, MalformedError, UsageError, os_errors, printable
from layerstore.store.names import check_name

USAGE_BYTES = 64 << 20
"""Of a table that is read: some million lines."""

_TASKS = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?")
_YES = frozenset({"yes", "true", "1", ""})
_NO = frozenset({"no", "false", "0"})
_COLUMNS = ("image", "tasks", "eligible")


@dataclass(frozen=True, slots=True)
class Usage:
    """A line: an image, how many tasks need it, whether it may leave, and where that is said."""

    image: str
    tasks: float
    eligible: bool = True
    line: int = 0


def read_usage(path: str) -> tuple[Usage, ...]:
    """The lines of a file.

    Raises:
        MalformedError: as :func:`parse_usage`.
        LimitError: it is too large.
        NotFoundError, PermissionError_, UnavailableError: it can't be read.
    """
    shown = printable(path)
    with os_errors(f"read {shown}"), open(path, "rb") as file:
        data = file.read(USAGE_BYTES + 1)
    if len(data) > USAGE_BYTES:
        raise LimitError(f"{shown} has more than {USAGE_BYTES} bytes: split it")
    return parse_usage(data, shown)


def parse_usage(data: bytes, what: str) -> tuple[Usage, ...]:
    """The lines of a table; ``what`` begins messages, which name the line.

    Raises:
        MalformedError: no such table; an image is no reference or named twice, tasks are no number.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise MalformedError(f"{what}, line {line}: not UTF-8") from error
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    found: dict[str, Usage] = {}
    columns: dict[str, int] | None = None
    try:
        for row in rows:
            where = f"{what}, line {rows.line_num}"
            if not any(cell.strip() for cell in row):
                continue
            if columns is None:
                columns = _columns(row, where)
                width = len(row)
                continue
            if len(row) != width:
                raise MalformedError(f"{where}: {len(row)} columns, where the headings have {width}")
            usage = _usage(row, columns, rows.line_num, where)
            other = found.setdefault(usage.image, usage)
            if other is not usage:
                raise MalformedError(f"{where}: image {usage.image!r} is on line {other.line} already: add them up")
    except csv.Error as error:
        raise MalformedError(f"{what}, line {rows.line_num}: {printable(str(error))}") from error
    if columns is None:
        raise MalformedError(f"{what} is empty: it begins with a line of headings: image,tasks,eligible")
    return tuple(found.values())


def _columns(row: list[str], where: str) -> dict[str, int]:
    names = [cell.strip().lower() for cell in row]
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise MalformedError(f"{where}: two columns are named {name!r}")
        if name not in names and name != "eligible":
            raise MalformedError(f"{where}: no column is named {name!r}: the headings are image,tasks,eligible")
    return {name: names.index(name) for name in _COLUMNS if name in names}


def _usage(row: list[str], columns: dict[str, int], line: int, where: str) -> Usage:
    image, tasks = row[columns["image"]].strip(), row[columns["tasks"]].strip()
    eligible = row[columns["eligible"]].strip().lower() if "eligible" in columns else ""
    try:
        check_name(image)
    except UsageError as error:
        raise MalformedError(f"{where}: {error}") from error
    if not _TASKS.fullmatch(tasks):
        raise MalformedError(f"{where}: tasks are a number such as 12 or 0.5, not {printable(tasks[:40])!r}")
    if eligible not in _YES | _NO:
        raise MalformedError(f"{where}: eligible is yes, no or empty, not {printable(eligible[:40])!r}")
    return Usage(image, float(tasks) if "." in tasks else int(tasks), eligible in _YES, line)
