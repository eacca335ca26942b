"""What OCI layers mean: members applied in order to the tree that the layers below have left.

The rules are those of image-spec 1.1 layer.md, read as containerd and umoci read them:

* The last member of a name wins. A directory over a directory replaces its attributes and nothing else; any other
  combination removes what was there, whole trees included.
* ``.wh.NAME`` removes NAME, ``.wh..wh..opq`` all of its directory's content, as far as they come from layers below:
  what the same layer adds stays, wherever in the archive the marker is. Only a marker's name counts, not its type,
  body or link. Markers make nothing, and one that finds nothing to remove is content with that.
* Other names that begin with ``.wh..wh.`` are AUFS's own; they are left out, but hard links into
  ``.wh..wh.plnk`` get the content.
* A parent that is a symlink is followed inside the image, a last component never is. Names mean what they mean when
  the member is read.
* A hard link whose target is not there yet is resolved at the end of its layer. Its header's attributes are ignored.

With a ``lower`` the result is an overlay delta over it. It is taken from the same whole view as without, by comparing
inodes by identity, so a stack cut at any layer shows the same tree.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable

from layerstore.errors import LimitError, MalformedError, UnsupportedError, printable
from layerstore.limits import Limits
from layerstore.tar.member import Member
from layerstore.tree.attributes import escape
from layerstore.tree.difference import overlay_delta
from layerstore.tree.inode import ByteSource, Directory, Extent, File, Inode, Special, Symlink, walk
from layerstore.tree.links import restore_names
from layerstore.tree.path import NAME_MAX, PATH_MAX, Parts, clean
from layerstore.tree.resolve import Trail, find, trace
from layerstore.tree.view import IMPLIED, Claim, Node, View

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."
_AUFS_LINKS = b".wh..wh.plnk"

_WARNINGS = 100  # of one layer, before the rest is only counted


class _PendingLink(Inode):
    """Stands for the inode of a hard link until its target has been read."""

    __slots__ = ("offset", "target")

    def __init__(self, target: bytes, offset: int) -> None:
        super().__init__(IMPLIED)
        self.target = target
        self.offset = offset


class Merge:
    """Collects the layers of an image, bottom first.

    Without ``lower`` the result is the image's whole tree. With it, which must be a whole tree and is not modified,
    the result is the delta over it. After an error the object is of no further use.
    """

    def __init__(self, *, lower: Directory | None = None, warn: Callable[[str], None], limits: Limits) -> None:
        self._lower = lower
        self._tell = warn
        self._limits = limits
        self._view = View(Directory(IMPLIED) if lower is None else lower, self._warn_replaced)
        self._members = 0
        self._linked: dict[int, Inode] = {}
        # Of the current layer:
        self._pending: list[tuple[Node, bytes, _PendingLink]] = []
        self._aufs_links: dict[Parts, Inode] = {}
        self._parent: tuple[bytes, Node] | None = None
        self._warnings = 0

    def apply(self, members: Iterable[Member], source: ByteSource) -> None:
        """Apply one layer; ``source`` is its decompressed stream, to which file data will refer.

        Raises:
            MalformedError: an entry that can't be part of a root file system, named.
            LimitError: more entries than the limit, implied directories included.
            UnsupportedError: an entry of an unknown kind.
        """
        self._view.begin()
        for member in members:
            self._members += 1
            if self._members + self._view.created > self._limits.entries:
                raise LimitError(f"the image has more than {self._limits.entries:,} entries, which is the limit set")
            self._apply(member, source)
        self._resolve_pending()
        self._view.end()
        self._aufs_links = {}
        self._parent = None
        if self._warnings > _WARNINGS:
            self._tell(f"{self._warnings - _WARNINGS:,} more warnings about this layer")
        self._warnings = 0

    def tree(self) -> Directory:
        """The whole tree, or the delta over ``lower``. Later layers don't change what was returned."""
        if self._lower is None:
            return self._view.root
        lost: set[int] = set()
        delta = overlay_delta(
            self._lower,
            self._view.root,
            unchanged=lambda old, new: old is new,
            replaced=lambda old, new: isinstance(new, Node) and new.base is not old,
            lost=lost,
        )
        restore_names(delta, self._view.root, lost.union(self._linked))
        return delta

    # -- one member -------------------------------------------------------------------------------------------------

    def _apply(self, member: Member, source: ByteSource) -> None:
        path = member.path.rstrip(b"/")
        head, _, name = path.rpartition(b"/")
        if self._parent is None or self._parent[0] != head or not _plain(name) or len(path) >= PATH_MAX:
            parts = clean(path)
            if self._is_marker(member, parts, source):
                return
            if not parts:
                self._apply_root(member)
                return
            name = parts[-1]
            parent = self._view.directory(trace(self._view.root, parts[:-1]), member.path)
            # Only a head that ends in the parent's own name stands for it again.
            self._parent = (head, parent) if _plain(path.rpartition(b"/")[2]) else None
        else:
            parent = self._parent[1]
        if member.kind == stat.S_IFDIR and member.hardlink is None:
            self._put_directory(parent, name, member)
        else:
            self._put(parent, name, self._inode(member, source), member)

    def _apply_root(self, member: Member) -> None:
        if member.kind != stat.S_IFDIR or member.hardlink is not None:
            raise MalformedError(
                f"entry {printable(member.path)!r} names the root, which can only be a directory", offset=member.offset
            )
        self._view.declare_root(escape(member.attrs, member.path, self._warn))

    def _put_directory(self, parent: Node, name: bytes, member: Member) -> None:
        claim = self._view.added(parent, name)
        found = parent.entries.get(name)
        if found is not None and not isinstance(found, Directory):
            self._parent = None
        if claim is Claim.DECLARED:
            self._warn_duplicate(member)
        self._view.declare(parent, name, escape(member.attrs, member.path, self._warn))

    def _put(self, parent: Node, name: bytes, inode: Inode, member: Member) -> None:
        found = parent.entries.get(name)
        if found is not None:
            if self._view.added(parent, name):
                self._warn_duplicate(member)
            if isinstance(found, Directory | Symlink):
                self._parent = None
        self._view.put(parent, name, inode)
        if isinstance(inode, _PendingLink):
            self._pending.append((parent, name, inode))

    def _inode(self, member: Member, source: ByteSource) -> Inode:
        if member.hardlink is not None:
            return self._link_target(member, member.hardlink)
        attrs = escape(member.attrs, member.path, self._warn)
        kind = member.kind
        if kind == stat.S_IFREG:
            extents = tuple([Extent(offset, length, source, at) for offset, length, at in member.data])
            return File(attrs, member.size, extents)
        if kind == stat.S_IFLNK:
            return Symlink(attrs, member.target)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            if kind == stat.S_IFCHR and member.major == member.minor == 0:
                raise MalformedError(
                    f"{printable(member.path)}: a character device 0:0 would act as an overlay whiteout; "
                    "take it out of the image",
                    offset=member.offset,
                )
            return Special(attrs, member.major, member.minor)
        if kind in (stat.S_IFIFO, stat.S_IFSOCK):
            return Special(attrs)
        raise UnsupportedError(f"{printable(member.path)}: unknown kind of entry {kind:#o}")

    # -- whiteouts --------------------------------------------------------------------------------------------------

    def _is_marker(self, member: Member, parts: Parts, source: ByteSource) -> bool:
        """Act on a whiteout, opaque marker or AUFS entry; what lies below one, were it a directory, is its body."""
        depth = next((depth for depth, part in enumerate(parts) if part.startswith(_WHITEOUT)), None)
        if depth is None:
            return False
        above, part = parts[:depth], parts[depth]
        if part == _OPAQUE:
            self._parent = None
            self._view.clear(trace(self._view.root, above))
        elif part.startswith(_AUFS):
            if depth == 0 and part == _AUFS_LINKS:
                self._keep_aufs_link(member, parts[1:], source)
        else:
            name = part.removeprefix(_WHITEOUT)
            if name in (b"", b".", b".."):
                raise MalformedError(
                    f"{printable(member.path)}: a whiteout of {printable(name) or 'nothing'!r}", offset=member.offset
                )
            self._parent = None
            self._view.hide(trace(self._view.root, above), name)
        if depth < len(parts) - 1 and not part.startswith(_AUFS):
            self._warn(f"{printable(member.path)}: left out, it lies inside of a whiteout")
        return True

    def _keep_aufs_link(self, member: Member, name: Parts, source: ByteSource) -> None:
        if member.kind == stat.S_IFDIR:
            return
        inode = self._inode(member, source)
        if not isinstance(inode, _PendingLink):
            self._aufs_links[name] = inode

    # -- hard links -------------------------------------------------------------------------------------------------

    def _link_target(self, member: Member, target: bytes) -> Inode:
        inode = self._find_link_target(target)
        if inode is None:
            return _PendingLink(target, member.offset)
        if isinstance(inode, Directory):
            raise _link_to_directory(member.path, target, member.offset)
        if self._lower is not None and not isinstance(inode, _PendingLink):
            self._linked[id(inode)] = inode
        return inode

    def _find_link_target(self, target: bytes) -> Inode | None:
        parts = clean(target)
        if parts[:1] == (_AUFS_LINKS,):
            return self._aufs_links.get(parts[1:])
        return find(self._view.root, parts)

    def _resolve_pending(self) -> None:
        """Replace the placeholders that are still in the tree by what their targets have turned out to be."""
        resolved: dict[_PendingLink, Inode | None] = {}
        for parent, name, link in self._pending:
            if parent.entries.get(name) is not link:
                continue
            chain: list[_PendingLink] = []
            inode: Inode | None = link
            while isinstance(inode, _PendingLink):
                if inode in resolved:
                    inode = resolved[inode]
                    break
                resolved[inode] = None  # what a circle comes back to
                chain.append(inode)
                inode = self._find_pending_target(inode.target)
            resolved.update(dict.fromkeys(chain, inode))
            if inode is not None:
                self._view.put(parent, name, inode)
                if self._lower is not None:
                    self._linked[id(inode)] = inode
        if None in resolved.values():
            self._refuse_dangling()
        self._pending = []

    def _find_pending_target(self, target: bytes) -> Inode | None:
        """None for anything that can't be linked to: it is an error only if the link is still in the tree."""
        try:
            inode = self._find_link_target(target)
        except MalformedError:
            return None
        return None if isinstance(inode, Directory) else inode

    def _refuse_dangling(self) -> None:
        for path, inode in walk(self._view.root):
            if isinstance(inode, _PendingLink):
                if isinstance(self._find_link_target(inode.target), Directory):
                    raise _link_to_directory(path, inode.target, inode.offset)
                raise MalformedError(
                    f"{printable(path)}: a hard link to {printable(inode.target)}, which is neither in this layer "
                    "nor in those below",
                    offset=inode.offset,
                )

    # -- warnings ---------------------------------------------------------------------------------------------------

    def _warn(self, line: str) -> None:
        self._warnings += 1
        if self._warnings <= _WARNINGS:
            self._tell(line)

    def _warn_duplicate(self, member: Member) -> None:
        self._warn(f"{printable(member.path)}: in the layer more than once; the last one counts")

    def _warn_replaced(self, member: bytes, trail: Trail) -> None:
        self._parent = None
        obstacle = b"/".join(name for name, _ in trail)
        self._warn(f"{printable(obstacle)}: is no directory, but becomes one because of {printable(member)}")


def _link_to_directory(path: bytes, target: bytes, offset: int) -> MalformedError:
    return MalformedError(f"{printable(path)}: a hard link to {printable(target)}, which is a directory", offset=offset)


def _plain(name: bytes) -> bool:
    """Whether a last component needs no further look."""
    return (
        name not in (b"", b".", b"..")
        and len(name) <= NAME_MAX
        and not name.startswith(_WHITEOUT)
        and b"\0" not in name
    )
