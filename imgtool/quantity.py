"""Sizes and spans of time as people write them."""

from __future__ import annotations

import re

import click

from layerstore.errors import UsageError
from overlay.service.duration import parse_duration

_FORM = re.compile(r"(\d{1,15})\s*([KMGT]?)(?:iB|i|B)?", re.IGNORECASE)
_SHIFT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class _Size(click.ParamType):  # type: ignore[type-arg]
    """``10G``, ``512MiB``, ``4096``: powers of 1024, as qemu-img and docker take them. The value is in bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _FORM.fullmatch(str(value))
        if match is None or not int(match[1]):
            self.fail(f"{value!r} is not a size; write it as 512M, 10G or a number of bytes", param, ctx)
        return int(match[1]) << _SHIFT[match[2].upper()]


class _Duration(click.ParamType):  # type: ignore[type-arg]
    """``90s``, ``1h30m``: see :func:`overlay.service.duration.parse_duration`. The value is in seconds."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()
DURATION = _Duration()
