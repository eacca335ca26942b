"""Names of references, such as ``debian-full``, ``team/repo:2024.1`` or ``localhost:5000/base``.

::

    name = part *("/" part)
    part = (letter | digit) *(letter | digit | "." | "_" | "-" | ":")

ASCII only; no empty part, and none that starts with a dot, so ``..`` is none. There is no ``@``, and no name
starts as a digest does, so what a user types is one or the other. In a directory a name is one file: ``/`` is written
``%2F``, everything else stands for itself.
"""

from __future__ import annotations

import re

from layerstore.errors import UsageError, printable

NAME_LIMIT = 255
"""Bytes of a name as a file, where a slash takes three: NAME_MAX of Linux file systems."""

_PART = "[A-Za-z0-9][A-Za-z0-9._:-]*"
_NAME = re.compile(f"{_PART}(?:/{_PART})*")
_DIGEST_STARTS = ("sha256:", "sha512:")


def check_name(name: str) -> str:
    """The name itself.

    Raises:
        UsageError: it breaks the grammar.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{_shown(name)} is not a reference name: use letters, digits and . _ - : in parts that start with a "
            "letter or digit, with / between them"
        )
    if name.startswith(_DIGEST_STARTS):
        raise UsageError(f"{_shown(name)} reads as a digest, not as a reference name")
    if len(name) + 2 * name.count("/") > NAME_LIMIT:
        raise UsageError(f"{_shown(name)} is longer than a reference name's {NAME_LIMIT} bytes (a slash takes 3)")
    return name


def encode_name(name: str) -> str:
    """The file name for a valid reference name."""
    return check_name(name).replace("/", "%2F")


def decode_name(file_name: str) -> str:
    """The reference name for a file name.

    Raises:
        UsageError: :func:`encode_name` never gives this.
    """
    return check_name(file_name.replace("%2F", "/"))


def _shown(name: object) -> str:
    try:
        text = printable(name) if isinstance(name, str) else repr(name)
    except UnicodeEncodeError:  # a str that never was bytes
        text = ascii(name)
    return f"'{text[:80]}…'" if len(text) > 80 else f"'{text}'"
