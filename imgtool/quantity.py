"""Sizes and spans of time as people write them."""

from __future__ import annotations

import re

import click

from layerstore.errors import UsageError
from overlay.service.duration import parse_duration

_FORM = re.compile(r"(\d{1,15})\s*([KMGT]?)(?:iB|i|B)?", re.IGNORECASE)
_LATENCY = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(m?)s")
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


class _Latency(click.ParamType):  # type: ignore[type-arg]
    """``20ms``, ``0.5s``, ``0ms``: how long something takes, which may be no time. The value is in seconds."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _LATENCY.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a time; write it as 20ms or 0.5s", param, ctx)
        return float(match[1]) / (1000 if match[2] else 1)


SIZE = _Size()
LATENCY = _Latency()
DURATION = _Duration()
