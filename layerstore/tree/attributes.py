"""Attributes as trees keep them: what Linux can store, and nothing that means something to overlayfs.

xattrs named ``trusted.overlay.*`` steer an overlay mount, so a layer that brings one would rewrite the view (a
redirect pulls content from elsewhere). They are kept under ``trusted.overlay.overlay.*``, which the kernel shows
under the original name since Linux 6.7 (overlayfs.rst, "Nesting overlayfs mounts"). Sandboxes are mounted without
``userxattr``: ``user.overlay.*`` is ordinary data.
"""

from __future__ import annotations

from collections.abc import Callable

from layerstore.errors import MalformedError, printable
from layerstore.tree.inode import Attrs

OVERLAY_PREFIX = b"trusted.overlay."
"""The namespace of a mount without ``userxattr`` (OVL_XATTR_TRUSTED_PREFIX, fs/overlayfs/overlayfs.h)."""

ESCAPED_PREFIX = OVERLAY_PREFIX + b"overlay."

_NAMESPACES = (b"user.", b"trusted.", b"security.")
_ACLS = frozenset({b"system.posix_acl_access", b"system.posix_acl_default"})
"""What file systems of Linux store (xattr(7)). Archives made elsewhere have others, ``com.apple.provenance`` above all;
setting one fails with EOPNOTSUPP, which containerd and umoci pass over."""

XATTR_NAME_MAX = 255
"""Bytes in the name of an xattr (linux/limits.h)."""


def escape(attrs: Attrs, path: bytes, warn: Callable[[str], None]) -> Attrs:
    """The attributes without xattrs that no file system takes, and none that an overlay mount would act on.

    A warning for each names ``path``.

    Raises:
        MalformedError: an escaped name would be too long.
    """
    if all(_is_storable(name) and not name.startswith(OVERLAY_PREFIX) for name, _ in attrs.xattrs):
        return attrs
    pairs: list[tuple[bytes, bytes]] = []
    for name, value in attrs.xattrs:
        kept = name
        if not _is_storable(name):
            warn(f"{printable(path)}: xattr {printable(name)} is left out, no file system of Linux stores it")
            continue
        if name.startswith(OVERLAY_PREFIX):
            kept = ESCAPED_PREFIX + name[len(OVERLAY_PREFIX) :]
            if len(kept) > XATTR_NAME_MAX:
                raise MalformedError(f"{printable(path)}: xattr {printable(name)} has too long a name to be escaped")
            warn(f"{printable(path)}: xattr {printable(name)} is kept as {printable(kept)}")
        pairs.append((kept, value))
    return attrs._replace(xattrs=tuple(sorted(pairs)))


def _is_storable(name: bytes) -> bool:
    return name in _ACLS or any(name.startswith(space) and len(name) > len(space) for space in _NAMESPACES)
