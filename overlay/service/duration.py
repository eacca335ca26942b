"""Spans of time as people write them."""

from __future__ import annotations

import re

from layerstore.errors import UsageError
from layerstore.oci.document import shown

_FORM = re.compile(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,7})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,10}(?:\.[0-9]{1,6})?)s)?")
_LENGTHS = (86_400.0, 3_600.0, 60.0, 1.0)


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``1h30m``, ``2d``: days, hours, minutes and seconds, in this order, more than none.

    Raises:
        UsageError: written in another way.
    """
    match = _FORM.fullmatch(text)
    seconds = (
        sum(float(part) * length for part, length in zip(match.groups("0"), _LENGTHS, strict=True)) if match else 0
    )
    if not seconds:
        raise UsageError(f"{shown(text, 40)} is not a span of time; write it as 90s, 30m, 1h30m or 2d")
    return seconds
