"""What the environment says. No other module reads it."""

from __future__ import annotations

import os

DEFAULT_ROOT = "/var/lib/imgtool"


def root() -> str:
    """``IMGTOOL_ROOT``: state of this node."""
    return os.environ.get("IMGTOOL_ROOT") or DEFAULT_ROOT


def store() -> str | None:
    """``IMGTOOL_STORE``: where layers are published; None means the store under the root."""
    return os.environ.get("IMGTOOL_STORE") or None


def terminal() -> str | None:
    """``TERM``, for programs in a sandbox."""
    return os.environ.get("TERM") or None
