"""Attributes as trees keep them: equal ones are one object, and none of them means anything to overlayfs.

xattrs named ``trusted.overlay.*`` steer an overlay mount, so a layer that brings one would rewrite the view (a
redirect pulls content from elsewhere). They are kept under ``trusted.overlay.overlay.*``, which the kernel shows
under the original name since Linux 6.7 (overlayfs.rst, "Nesting overlayfs mounts"). Sandboxes are mounted without
``userxattr``: ``user.overlay.*`` is ordinary data.
"""

from __future__ import annotations

from collections.abc import Callable

from layerstore.errors import MalformedError, printable
from layerstore.tree.inode import Attrs, Xattrs

OVERLAY_PREFIX = b"trusted.overlay."
"""The namespace of a mount without ``userxattr`` (OVL_XATTR_TRUSTED_PREFIX, fs/overlayfs/overlayfs.h)."""

ESCAPED_PREFIX = OVERLAY_PREFIX + b"overlay."

XATTR_NAME_MAX = 255
"""Bytes in the name of an xattr (linux/limits.h)."""

_BOUND = 1 << 16


class AttributeTable:
    """Makes Attrs ready for a tree.

    The table is emptied when it is full: equal attributes come close together, and a table of a million different
    ones would weigh more than it saves.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._attrs: dict[Attrs, Attrs] = {}
        self._xattrs: dict[Xattrs, Xattrs] = {}

    def intern(self, attrs: Attrs, path: bytes) -> Attrs:
        """The one object for these attributes, overlay xattrs escaped with a warning that names ``path``.

        Raises:
            MalformedError: an escaped name would be too long.
        """
        if attrs.xattrs:
            attrs = attrs._replace(xattrs=self._escape(attrs.xattrs, path))
        if len(self._attrs) >= _BOUND:
            self._attrs.clear()
        return self._attrs.setdefault(attrs, attrs)

    def _escape(self, xattrs: Xattrs, path: bytes) -> Xattrs:
        if any(name.startswith(OVERLAY_PREFIX) for name, _ in xattrs):
            xattrs = tuple(sorted((self._escaped_name(name, path), value) for name, value in xattrs))
        if len(self._xattrs) >= _BOUND:
            self._xattrs.clear()
        return self._xattrs.setdefault(xattrs, xattrs)

    def _escaped_name(self, name: bytes, path: bytes) -> bytes:
        if not name.startswith(OVERLAY_PREFIX):
            return name
        escaped = ESCAPED_PREFIX + name[len(OVERLAY_PREFIX) :]
        if len(escaped) > XATTR_NAME_MAX:
            raise MalformedError(f"{printable(path)}: xattr {printable(name)} has too long a name to be escaped")
        self._warn(f"{printable(path)}: xattr {printable(name)} is kept as {printable(escaped)}")
        return escaped
