"""A layer's tree as a tar layer: what :class:`layerstore.tree.merge.Merge` reads back as the same tree.

Members are in byte order of their paths, a directory before what is in it; ``./`` with the attributes of the root comes
first. A whiteout is an empty ``.wh.NAME``, an opaque directory has a ``.wh..wh..opq`` right behind it. The first name
of a hard link has the data; the others come later and refer to it.

What a tar layer can't say:

* Holes: they become zeros.
* Sockets: left out, with a warning; where the layer lies on others a whiteout stands for it, for it hides too.
* Names that begin with ``.wh.``: they would delete something. They are refused, and so are whiteouts of names so long
  that no file can have the name of the whiteout.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from layerstore.content import read_range
from layerstore.erofs.layout import Chunked
from layerstore.errors import LimitError, UnsupportedError, printable
from layerstore.export.gather import Data, Piece, Run, runs_of
from layerstore.export.tarheader import (
    BLKTYPE,
    CHRTYPE,
    DIRTYPE,
    END,
    FIFOTYPE,
    LNKTYPE,
    REGTYPE,
    SYMTYPE,
    Entry,
    headers,
)
from layerstore.limits import DEFAULT_LIMITS
from layerstore.progress import SILENT, Progress
from layerstore.tar.format import padded
from layerstore.tree.attributes import ESCAPED_PREFIX, OVERLAY_PREFIX
from layerstore.tree.inode import Attrs, Directory, File, Inode, Special, Symlink, Whiteout, walk
from layerstore.tree.path import NAME_MAX

Write = Callable[[bytes | memoryview], object]

_MARK = b".wh."
_OPAQUE = _MARK + b".wh..opq"
_NOBODY = Attrs(stat.S_IFREG, 0, 0, 0, 0)
"""Of whiteouts and opaque markers: nothing of them is ever seen."""
_ZEROS = bytes(1 << 20)
_LARGE_HOLE = 1 << 30
"""Bytes of holes in one file that deserve a warning: as zeros they take space wherever the layer is unpacked."""
_DEVICES = {stat.S_IFCHR: CHRTYPE, stat.S_IFBLK: BLKTYPE, stat.S_IFIFO: FIFOTYPE}


@dataclass(frozen=True, slots=True)
class TarSummary:
    """What was written: members, and bytes of file data, holes included."""

    members: int
    data_size: int


def write_tar(
    tree: Directory,
    data: Data,
    write: Write,
    *,
    bottom: bool,
    warn: Callable[[str], None],
    progress: Progress = SILENT,
) -> TarSummary:
    """Give the tar layer of a tree to ``write``, from its first byte to its last.

    Args:
        tree: of one layer.
        data: over the packs that its files refer to.
        write: may be given memory that must not be kept.
        bottom: whether no layer is below it.
        warn: receives a line for what is left out.
        progress: advances by bytes of file data.

    Raises:
        UnsupportedError: a name that would mean something else in a tar layer.
        LimitError: a file that our own reader would refuse; it has holes, or is none of ours.
        CorruptError, NotFoundError: as :meth:`Data.read`.
    """
    return _Writer(tree, data, write, bottom, warn, progress).run()


class _Writer:
    def __init__(
        self,
        tree: Directory,
        data: Data,
        write: Write,
        bottom: bool,
        warn: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._tree = tree
        self._write = write
        self._bottom = bottom
        self._warn = warn
        self._progress = progress
        self._data = data.read(_pieces(tree))
        self._first: dict[int, bytes] = {}  # by id() of inodes with several names: the one that has the data
        self._members = 0
        self._bytes = 0

    def run(self) -> TarSummary:
        linked = _linked(self._tree)
        try:
            for path, inode in walk(self._tree):
                if path.rpartition(b"/")[2].startswith(_MARK):
                    raise UnsupportedError(
                        f"/{printable(path)}: in a tar layer a name that begins with .wh. deletes another; rename it, "
                        "or export --for containerd"
                    )
                if isinstance(inode, Directory):
                    self._directory(path, inode)
                elif isinstance(inode, Whiteout):
                    self._whiteout(path)
                elif id(inode) in linked and (first := self._first.setdefault(id(inode), path)) is not path:
                    self._put(Entry(path, LNKTYPE, _shown(inode.attrs), link=first))
                else:
                    self._inode(path, inode)
        finally:
            self._data.close()
        self._write(END)
        return TarSummary(self._members, self._bytes)

    def _put(self, entry: Entry) -> None:
        self._members += 1
        self._write(headers(entry))

    def _directory(self, path: bytes, directory: Directory) -> None:
        prefix = path + b"/" if path else b"./"
        self._put(Entry(prefix, DIRTYPE, _shown(directory.attrs)))
        if directory.opaque and path:  # overlayfs merges roots, whatever they say
            self._put(Entry(prefix + _OPAQUE, REGTYPE, _NOBODY))

    def _whiteout(self, path: bytes) -> None:
        parent, slash, name = path.rpartition(b"/")
        if len(_MARK) + len(name) > NAME_MAX:
            raise UnsupportedError(
                f"/{printable(path)}: the whiteout of so long a name has no name in a tar layer; "
                "export --for containerd keeps it"
            )
        self._put(Entry(parent + slash + _MARK + name, REGTYPE, _NOBODY))

    def _inode(self, path: bytes, inode: Inode) -> None:
        attrs = _shown(inode.attrs)
        if isinstance(inode, File):
            if inode.size > DEFAULT_LIMITS.file_bytes:
                raise LimitError(
                    f"/{printable(path)}: {inode.size} bytes, which a tar layer has in full; "
                    f"{DEFAULT_LIMITS.file_bytes} are the limit"
                )
            self._put(Entry(path, REGTYPE, attrs, size=inode.size))
            self._body(path, inode)
        elif isinstance(inode, Symlink):
            self._put(Entry(path, SYMTYPE, attrs, link=inode.target))
        elif isinstance(inode, Special) and inode.kind in _DEVICES:
            self._put(Entry(path, _DEVICES[inode.kind], attrs, major=inode.major, minor=inode.minor))
        else:
            self._warn(f"/{printable(path)}: left out, tar has no sockets")
            if not self._bottom:
                self._whiteout(path)

    def _body(self, path: bytes, file: File) -> None:
        holes = 0
        for run in _runs(file):
            if run.device:
                left = run.length
                while left:
                    data = next(self._data)
                    left -= len(data)
                    self._out(data)
            else:
                holes += run.length
                for start in range(0, run.length, len(_ZEROS)):
                    self._out(memoryview(_ZEROS)[: min(len(_ZEROS), run.length - start)])
        if not isinstance(file.chunks, Chunked):
            # Inline in the metadata image: at most a block, all in one piece.
            self._out(memoryview(read_range(file, 0, file.size)))
        self._write(bytes(padded(file.size) - file.size))
        if holes >= _LARGE_HOLE:
            self._warn(f"/{printable(path)}: {holes} bytes of holes become zeros, tar layers have none")

    def _out(self, data: memoryview) -> None:
        self._write(data)
        self._bytes += len(data)
        self._progress.advance(len(data))


def data_size(tree: Directory) -> int:
    """Bytes of file data that :func:`write_tar` writes for a tree."""
    return sum(file.size for file in _files(tree))


def _files(tree: Directory) -> Iterator[File]:
    """Regular files, each once, in the order of the walk."""
    linked = _linked(tree)
    met: set[int] = set()
    for _, inode in walk(tree):
        if isinstance(inode, File):
            if id(inode) in linked:
                if id(inode) in met:
                    continue
                met.add(id(inode))
            yield inode


def _pieces(tree: Directory) -> Iterator[Piece]:
    for file in _files(tree):
        for run in _runs(file):
            if run.device:
                yield Piece(*run)


def _runs(file: File) -> Iterator[Run]:
    return runs_of(file) if isinstance(file.chunks, Chunked) else iter(())


def _linked(tree: Directory) -> set[int]:
    """By id(), the non-directories with several names."""
    seen: set[int] = set()
    linked: set[int] = set()
    stack = [tree]
    while stack:
        for inode in stack.pop().entries.values():
            if isinstance(inode, Directory):
                stack.append(inode)
            elif id(inode) in seen:
                linked.add(id(inode))
            else:
                seen.add(id(inode))
    return linked


def _shown(attrs: Attrs) -> Attrs:
    """The attributes as a mounted layer shows them: overlayfs's own xattrs under the names they came with."""
    if not any(name.startswith(ESCAPED_PREFIX) for name, _ in attrs.xattrs):
        return attrs
    pairs = (
        (OVERLAY_PREFIX + name[len(ESCAPED_PREFIX) :] if name.startswith(ESCAPED_PREFIX) else name, value)
        for name, value in attrs.xattrs
    )
    return attrs._replace(xattrs=tuple(sorted(pairs)))
