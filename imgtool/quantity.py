"""Sizes as people write them."""

from __future__ import annotations

import re

import click

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


SIZE = _Size()
