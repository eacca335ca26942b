"""From header blocks to members."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from layerstore.errors import LimitError, MalformedError, UnsupportedError, printable
from layerstore.limits import Limits
from layerstore.tar import format as fmt
from layerstore.tar import pax
from layerstore.tar.format import BLOCK, ZERO_BLOCK, Header, padded, parse_number, string
from layerstore.tar.member import Member, Run
from layerstore.tar.sparse import Pair, Read, gnu_map, pax_map, runs_of
from layerstore.tree.inode import Attrs, Xattrs

_KINDS = {
    fmt.AREGTYPE: stat.S_IFREG,
    fmt.REGTYPE: stat.S_IFREG,
    fmt.CONTTYPE: stat.S_IFREG,
    fmt.GNUTYPE_SPARSE: stat.S_IFREG,
    fmt.LNKTYPE: stat.S_IFREG,
    fmt.SYMTYPE: stat.S_IFLNK,
    fmt.CHRTYPE: stat.S_IFCHR,
    fmt.BLKTYPE: stat.S_IFBLK,
    fmt.DIRTYPE: stat.S_IFDIR,
    fmt.GNUTYPE_DUMPDIR: stat.S_IFDIR,
    fmt.FIFOTYPE: stat.S_IFIFO,
}
_FILES = frozenset((fmt.AREGTYPE, fmt.REGTYPE, fmt.CONTTYPE, fmt.GNUTYPE_SPARSE))
_HEADER_ONLY = frozenset((fmt.LNKTYPE, fmt.SYMTYPE, fmt.CHRTYPE, fmt.BLKTYPE, fmt.DIRTYPE, fmt.FIFOTYPE))
_DEVICES = frozenset((fmt.CHRTYPE, fmt.BLKTYPE))
_EXTENDED = frozenset((fmt.XHDTYPE, fmt.SOLARIS_XHDTYPE, fmt.XGLTYPE, fmt.GNUTYPE_LONGNAME, fmt.GNUTYPE_LONGLINK))
_GLOBAL_REFUSED = frozenset((pax.PATH, pax.LINKPATH, pax.SIZE))

_WARNINGS = 100  # of one layer, before the rest is only counted
_CACHED = 1 << 16  # distinct (mode, ids, time, kind) of plain headers


@dataclass(slots=True)
class _Pending:
    """What the headers in front of a member say about it."""

    records: pax.Records | None = None
    longname: bytes | None = None
    longlink: bytes | None = None

    def __bool__(self) -> bool:
        return self.records is not None or self.longname is not None or self.longlink is not None


@dataclass(slots=True)
class _Body:
    """The bytes that the last header announced."""

    name: bytes
    header: int
    start: int
    size: int
    skipped: bool = False  # a size on a kind that has no body; the reader goes on at ``start``

    @property
    def next(self) -> int:
        return self.start if self.skipped else self.start + padded(self.size)


class MemberReader:
    """Iterates over the members of one tar.

    Args:
        read: access to the layer; called with growing offsets, or a few blocks back.
        limits: bounds on entries and file sizes.
        warn: receives one line for each oddity that is survivable, up to a hundred.
    """

    def __init__(
        self,
        read: Read,
        *,
        limits: Limits,
        warn: Callable[[str], None],
    ) -> None:
        self._read = read
        self._limits = limits
        self._warn_line = warn
        self._warned = 0
        self._plain: dict[tuple[bytes, bytes, bytes, bytes, int], Attrs] = {}
        self._global: pax.Keywords | None = None
        self._global_bytes = 0
        self._unapplied: set[bytes] = set()
        self._pending = _Pending()
        self._last = _Body(b"", 0, 0, 0)
        self._count = 0

    def __iter__(self) -> Iterator[Member]:
        pos = 0
        while True:
            block = self._read(pos, BLOCK)
            if len(block) < BLOCK or block == ZERO_BLOCK:
                self._end(pos, block)
                return
            header = self._header(pos, block)
            if header.typeflag in _EXTENDED:
                pos = self._extended(pos, header)
                continue
            member = self._member(pos, block, header)
            pos = self._last.next
            if member is not None:
                self._count += 1
                if self._count > self._limits.entries:
                    raise LimitError(f"layer has more than {self._limits.entries} entries, which is the limit")
                yield member

    # headers

    def _header(self, pos: int, block: bytes) -> Header:
        header = Header.unpack(block)
        try:
            stored = parse_number(header.chksum)
        except ValueError:
            stored = -1
        if stored == fmt.checksum(block) or stored == fmt.signed_checksum(block):
            return header
        if pos == 0:
            raise MalformedError("not a tar archive, nor one compressed by gzip, zstd, xz or bzip2", offset=0)
        after = f"after member {_show(self._last.name)}"
        if self._last.skipped:
            after += ", whose kind has no body but whose header claims one"
        raise MalformedError(f"corrupt layer: no valid header {after}", offset=pos)

    def _extended(self, pos: int, header: Header) -> int:
        """Take in a header that describes others; returns the offset behind it."""
        name = string(header.name)
        size = self._header_size(header.size, name, pos)
        if size > fmt.EXTENDED_BYTES:
            raise LimitError(
                f"extended header {_show(name)} at byte {pos} is {size} bytes; {fmt.EXTENDED_BYTES} are the limit"
            )
        self._last = _Body(name, pos, pos + BLOCK, size)
        body = self._read(pos + BLOCK, size)
        if len(body) < size:
            raise self._truncated()
        if header.typeflag == fmt.GNUTYPE_LONGNAME:
            self._pending.longname = string(body)
        elif header.typeflag == fmt.GNUTYPE_LONGLINK:
            self._pending.longlink = string(body)
        else:
            try:
                records = pax.parse_records(body)
            except ValueError as error:
                raise _malformed(name, str(error), pos) from error
            if header.typeflag == fmt.XGLTYPE:
                self._apply_global(records, name, pos)
            else:
                if self._pending.records is not None:
                    self._warn(
                        f"two extended headers before one member: {_show(name)} at byte {pos} replaces the first"
                    )
                self._pending.records = records
        return self._last.next

    def _apply_global(self, records: pax.Records, name: bytes, pos: int) -> None:
        for key, value in records:
            if value and (key in _GLOBAL_REFUSED or key.startswith(pax.SPARSE)):
                raise _malformed(name, f"global header sets {printable(key[:64])} for all members", pos)
        self._global_bytes += self._last.size
        if self._global_bytes > fmt.GLOBAL_BYTES:
            raise LimitError(f"layer has more than {fmt.GLOBAL_BYTES} bytes of global headers, which is the limit")
        self._global = self._global or pax.Keywords()
        self._global.apply(records)

    def _keywords(self) -> pax.Keywords | None:
        if self._pending.records is None:
            return self._global
        keywords = pax.Keywords() if self._global is None else self._global.copy()
        keywords.apply(self._pending.records)
        return keywords

    # members

    def _member(self, pos: int, block: bytes, header: Header) -> Member | None:
        """The member of this header, or None for one to skip; ``_last`` then says where it ends."""
        keywords = self._keywords() if self._pending or self._global else None
        name = self._path(header, pos, keywords)
        size = self._size(header, name, pos, keywords)
        flag = header.typeflag
        kind = _KINDS.get(flag)
        if kind is None:
            self._skip(flag, name, pos, size)
            return None
        if kind == stat.S_IFREG and name.endswith(b"/") and flag in _FILES:
            if size or flag == fmt.GNUTYPE_SPARSE or (keywords is not None and keywords.sparse):
                raise _malformed(name, "a regular file whose name ends in a slash", pos)
            kind = stat.S_IFDIR
        skipped = size > 0 and flag in _HEADER_ONLY
        self._last = _Body(name, pos, pos + BLOCK, size, skipped)
        try:
            link = self._link(header, name, flag, keywords)
            major, minor = self._device(header, keywords) if flag in _DEVICES else (0, 0)
            attrs = self._attrs(header, kind, name, keywords)
            logical = 0
            data: tuple[Run, ...] = ()
            if kind == stat.S_IFREG and link is None:
                logical, data = self._data(block, pos, size, flag, keywords)
        except ValueError as error:
            raise _malformed(name, str(error), pos) from error
        except EOFError:
            raise self._truncated() from None
        self._pending = _Pending()
        hardlink = link if flag == fmt.LNKTYPE else None
        target = link if link is not None and flag == fmt.SYMTYPE else b""
        return Member(name, kind, attrs, logical, hardlink, target, major, minor, data, pos)

    def _path(self, header: Header, pos: int, keywords: pax.Keywords | None) -> bytes:
        name = string(header.name)
        if header.prefix[0] and header.magic == fmt.MAGIC_POSIX:
            # star has times in the last 24 bytes of the prefix
            prefix = string(header.prefix[:131] if header.pad[8:] == fmt.STAR_TRAILER else header.prefix)
            name = prefix + b"/" + name
        if self._pending.longname:
            name = self._pending.longname
        if keywords is not None:
            try:
                name = keywords.name(pax.PATH) or name
                real = dict(keywords.sparse).get(pax.SPARSE_NAME)
                if real and header.typeflag in _FILES:
                    name = pax.checked_name(pax.SPARSE_NAME, real)
            except ValueError as error:
                raise _malformed(name, str(error), pos) from error
        return name

    def _size(self, header: Header, name: bytes, pos: int, keywords: pax.Keywords | None) -> int:
        size = None
        if keywords is not None:
            try:
                size = keywords.number(pax.SIZE)
            except ValueError as error:
                raise _malformed(name, str(error), pos) from error
        if size is None:
            size = self._header_size(header.size, name, pos)
        if size > fmt.OFFSET_MAX:
            raise _malformed(name, f"size {size} is beyond 64 bits", pos)
        if size > self._limits.file_bytes:
            raise self._too_large(name, size, pos)
        return size

    def _header_size(self, field: bytes, name: bytes, pos: int) -> int:
        try:
            value = parse_number(field)
            if value < 0:
                raise ValueError(f"{value} is negative")
        except ValueError as error:
            raise _malformed(name, f"size: {error}", pos) from error
        return value

    def _too_large(self, name: bytes, size: int, pos: int) -> LimitError:
        return LimitError(
            f"layer member {_show(name)} at byte {pos} is {size} bytes; "
            f"{self._limits.file_bytes} are the limit for one file"
        )

    def _skip(self, flag: bytes, name: bytes, pos: int, size: int) -> None:
        if flag == fmt.GNUTYPE_MULTIVOL:
            raise UnsupportedError(f"layer member {_show(name)} at byte {pos} began in another archive (multi-volume)")
        self._warn(f"layer member {_show(name)} at byte {pos} has unknown type {printable(flag)!r}: skipped")
        self._pending = _Pending()
        self._last = _Body(name, pos, pos + BLOCK, size)

    def _link(self, header: Header, name: bytes, flag: bytes, keywords: pax.Keywords | None) -> bytes | None:
        if flag not in (fmt.SYMTYPE, fmt.LNKTYPE):
            return None
        link = string(header.linkname)
        if self._pending.longlink:
            link = self._pending.longlink
        if keywords is not None:
            link = keywords.name(pax.LINKPATH) or link
        if not link:
            raise ValueError("a link without a target")
        if flag == fmt.SYMTYPE and len(link) > fmt.TARGET_MAX:
            raise ValueError(f"a symbolic link to {len(link)} bytes, of {fmt.TARGET_MAX} allowed")
        return link

    def _device(self, header: Header, keywords: pax.Keywords | None) -> tuple[int, int]:
        major = keywords.number(pax.DEVMAJOR) if keywords is not None else None
        minor = keywords.number(pax.DEVMINOR) if keywords is not None else None
        major = _field("devmajor", header.devmajor) if major is None else major
        minor = _field("devminor", header.devminor) if minor is None else minor
        if not (0 <= major <= fmt.MAJOR_MAX and 0 <= minor <= fmt.MINOR_MAX):
            raise ValueError(f"device number {major}:{minor} is out of range")
        return major, minor

    def _attrs(self, header: Header, kind: int, name: bytes, keywords: pax.Keywords | None) -> Attrs:
        if keywords is not None:
            return self._build_attrs(header, kind, name, keywords)
        key = (header.mode, header.uid, header.gid, header.mtime, kind)
        attrs = self._plain.get(key)
        if attrs is None:
            if len(self._plain) >= _CACHED:
                self._plain.clear()
            attrs = self._plain[key] = self._build_attrs(header, kind, name, None)
        return attrs

    def _build_attrs(self, header: Header, kind: int, name: bytes, keywords: pax.Keywords | None) -> Attrs:
        uid = gid = time = None
        xattrs: Xattrs = ()
        if keywords is not None:
            uid, gid = keywords.number(pax.UID), keywords.number(pax.GID)
            if (text := keywords.values.get(pax.MTIME)) is not None:
                time = pax.timestamp(text)
            xattrs = self._xattrs(name, keywords)
        mode = _field("mode", header.mode)
        if mode < 0:
            raise ValueError(f"mode {mode} is negative")
        permissions = 0o777 if kind == stat.S_IFLNK else mode & 0o7777
        seconds, nsec = (pax.checked_time(_field("mtime", header.mtime)), 0) if time is None else time
        return Attrs(
            kind | permissions,
            _checked_id("uid", _field("uid", header.uid) if uid is None else uid),
            _checked_id("gid", _field("gid", header.gid) if gid is None else gid),
            seconds,
            nsec,
            xattrs,
        )

    def _xattrs(self, name: bytes, keywords: pax.Keywords) -> Xattrs:
        for keyword in keywords.values:
            if keyword.startswith(pax.UNAPPLIED) and keyword not in self._unapplied:
                self._unapplied.add(keyword)
                self._warn(f"{printable(keyword[:64])} is not applied, as in layer member {_show(name)}")
        if not keywords.xattrs and not keywords.encoded:
            return ()
        xattrs = pax.xattrs_of(keywords)
        for key, value in xattrs:
            if key == pax.CAPABILITY and (fault := pax.capability_fault(value)) is not None:
                self._warn(f"security.capability of layer member {_show(name)} is kept but malformed: {fault}")
        return xattrs

    def _data(
        self, block: bytes, pos: int, size: int, flag: bytes, keywords: pax.Keywords | None
    ) -> tuple[int, tuple[Run, ...]]:
        """Logical size and runs of a regular file."""
        body = pos + BLOCK
        pairs: list[Pair]
        if flag == fmt.GNUTYPE_SPARSE:
            pairs, logical, at = gnu_map(block, body, self._read)
            stored = size
            self._last.start = at
        elif keywords is not None and keywords.sparse:
            pairs, logical, at = pax_map(keywords.sparse, body, size, self._read)
            stored = body + size - at
        else:
            return size, ((Run(0, size, body),) if size else ())
        if not 0 <= logical <= fmt.OFFSET_MAX:
            raise ValueError(f"size {logical} is beyond 64 bits")
        if logical > self._limits.file_bytes:
            raise self._too_large(self._last.name, logical, pos)
        return logical, runs_of(pairs, size=logical, at=at, stored=stored)

    # the end

    def _end(self, pos: int, block: bytes) -> None:
        """Judge the end of the archive: ``block`` is a zero block, or less than a block."""
        rest = self._read(pos + BLOCK, BLOCK) if len(block) == BLOCK else block
        if rest.strip(b"\0"):
            if len(block) < BLOCK:
                raise MalformedError(
                    f"truncated layer: ends inside the header after member {_show(self._last.name)}", offset=pos
                )
            raise MalformedError(
                f"corrupt layer: a lone zero block after member {_show(self._last.name)}, and more data", offset=pos
            )
        body = self._last
        if not block and not body.skipped and body.size and not self._read(body.start + body.size - 1, 1):
            raise self._truncated()
        if self._pending:
            if len(block) < BLOCK:
                raise self._truncated()
            self._warn(f"extended header {_show(body.name)} at the end of the layer describes nothing")
        if len(rest) < BLOCK:
            self._warn(f"layer has no complete end marker after member {_show(body.name)}")
        if body.skipped:
            self._check_skipped(body)
        if self._warned > _WARNINGS:
            self._warn_line(f"{self._warned - _WARNINGS} more warnings about this layer")

    def _check_skipped(self, body: _Body) -> None:
        """Refuse a body of zeros that passes for the end marker while members follow it."""
        behind = self._read(body.start + padded(body.size), BLOCK)
        if len(behind) == BLOCK and behind != ZERO_BLOCK:
            try:
                valid = parse_number(behind[148:156]) == fmt.checksum(behind)
            except ValueError:
                return
            if valid:
                raise _malformed(body.name, "has a body, which its kind must not have", body.header)

    def _truncated(self) -> MalformedError:
        return MalformedError(f"truncated layer: ends inside member {_show(self._last.name)}", offset=self._last.header)

    def _warn(self, line: str) -> None:
        self._warned += 1
        if self._warned <= _WARNINGS:
            self._warn_line(line)


def _field(what: str, field: bytes) -> int:
    try:
        return parse_number(field)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _checked_id(what: str, value: int) -> int:
    if not 0 <= value <= fmt.ID_MAX:
        raise ValueError(f"{what} {value} is outside 0 to {fmt.ID_MAX}")
    return value


def _malformed(name: bytes, what: str, pos: int) -> MalformedError:
    return MalformedError(f"malformed layer member {_show(name)}: {what}", offset=pos)


def _show(name: bytes) -> str:
    """A name for messages; long ones are cut."""
    text = printable(name[:200])
    return f'"{text}…"' if len(name) > 200 else f'"{text}"'
