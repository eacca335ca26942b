"""Names of references as tags of a registry, and back.

A tag has at most 128 letters, digits and ``_ . -``, and doesn't start with the last two (distribution-spec 1.1). A name
that is one already is its own tag. Every other has a ``/`` or a ``:``; its tag starts with ``_``, which no name does::

    team/repo:2024.1   ─▶   _team_.repo_-2024.1

that is, ``_.`` for ``/``, ``_-`` for ``:`` and ``__`` for ``_``. Tags of others that start so and are no name's tag
stand for no reference. Neither do the lists of referrers that clients keep under ``sha256-HEX``.
"""

from __future__ import annotations

import re

from layerstore.errors import UsageError
from layerstore.oci.document import shown
from layerstore.store.names import check_name

TAG_LIMIT = 128

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_REFERRERS = re.compile(r"sha256-[0-9a-f]{64}|sha512-[0-9a-f]{128}")
_ESCAPED = {"_": "__", "/": "_.", ":": "_-"}
_MEANT = {escape: char for char, escape in _ESCAPED.items()}


def encode_tag(name: str) -> str:
    """The tag of a reference.

    Raises:
        UsageError: not a valid name; one whose tag would be too long; or one where registries keep referrers.
    """
    check_name(name)
    if _REFERRERS.fullmatch(name):
        raise UsageError(f"{shown(name)} is where clients of registries keep referrers: choose another name")
    tag = name if _TAG.fullmatch(name) else "_" + "".join(_ESCAPED.get(char, char) for char in name)
    if len(tag) > TAG_LIMIT:
        raise UsageError(
            f"{shown(name)} is too long for a registry: its tag would have {len(tag)} characters, {TAG_LIMIT} at most"
        )
    return tag


def decode_tag(tag: str) -> str | None:
    """The reference that a tag is of; None if it is of none."""
    name = tag
    if tag.startswith("_"):
        name = re.sub(r"_[_.-]", lambda found: _MEANT[found[0]], tag[1:])
    try:
        return name if encode_tag(name) == tag else None
    except UsageError:
        return None
