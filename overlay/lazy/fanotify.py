"""The kernel's fanotify interface as far as lazy loading needs it: pre-content events of marked files, by ctypes.

Constants and records carry the names of ``<linux/fanotify.h>``; FAN_PRE_ACCESS and its range record came with Linux
6.14. Every failure is an OSError with errno.

An event is a reader that waits. It comes with a descriptor of the file, and the descriptor's *number* is the event's
name: any process that has the group may answer it, whoever read the event. The descriptor itself isn't needed for
that, but as long as it is open no other event gets its number.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_uint, c_uint64
from struct import Struct
from typing import NamedTuple

from layerstore.errors import MalformedError

FAN_CLOEXEC = 0x1
FAN_NONBLOCK = 0x2
FAN_CLASS_PRE_CONTENT = 0x8
FAN_UNLIMITED_QUEUE = 0x10
FAN_UNLIMITED_MARKS = 0x20

FAN_MARK_ADD = 0x1
FAN_MARK_REMOVE = 0x2
FAN_MARK_MOUNT = 0x10
AT_FDCWD = -100

FAN_PRE_ACCESS = 0x0010_0000
FAN_Q_OVERFLOW = 0x0000_4000

FAN_ALLOW = 0x1
FAN_DENY = 0x2
FAN_NOFD = -1

FANOTIFY_METADATA_VERSION = 3
FAN_EVENT_INFO_TYPE_RANGE = 6

fanotify_event_metadata = Struct("=IBBHQii")
"""event_len, vers, reserved, metadata_len, mask, fd, pid."""
fanotify_event_info_header = Struct("=BBH")
"""info_type, pad, len (of the whole record)."""
fanotify_event_info_range = Struct("=BBHIQQ")
"""The header, pad, offset, count: bytes of the file that are about to be read."""
fanotify_response = Struct("=iI")
"""fd, response."""

_METADATA_SIZE = fanotify_event_metadata.size
_EVENT = Struct(fanotify_event_metadata.format + fanotify_event_info_range.format[1:])
"""What the kernel sends for a file marked with FAN_PRE_ACCESS: the metadata and a range, with nothing between."""
_RANGE_SIZE = fanotify_event_info_range.size

BATCH = 85
"""The most events that one :func:`read` gives."""
_BUFFER = BATCH * _EVENT.size

UNKNOWN = -1
"""Length of an event whose range the kernel didn't name."""

_libc = ctypes.CDLL(None, use_errno=True)
_fanotify_init = _libc.fanotify_init
_fanotify_init.argtypes = (c_uint, c_uint)
_fanotify_mark = _libc.fanotify_mark
_fanotify_mark.argtypes = (c_int, c_uint, c_uint64, c_int, c_char_p)


class Event(NamedTuple):
    """``pid`` is about to read ``length`` bytes at ``offset`` of a marked file, and waits for the answer.

    Attributes:
        number: the descriptor of the file, which is the reader's of this event to close; FAN_NOFD says that the
            queue overflowed: events were lost, and their reads allowed. FAN_UNLIMITED_QUEUE rules that out.
        pid: 0 for a process that can't be seen from here.
        length: 0 for truncations; UNKNOWN.
    """

    number: int
    pid: int
    offset: int
    length: int


def init() -> int:
    """A new group for pre-content events, non-blocking, with no limit on its queue: overflow would allow reads.

    Descriptors of events are read-only: who fills files has its own, opened before the mark.

    Raises:
        OSError: EPERM without CAP_SYS_ADMIN; EINVAL from a kernel without CONFIG_FANOTIFY_ACCESS_PERMISSIONS.
    """
    flags = FAN_CLASS_PRE_CONTENT | FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_QUEUE | FAN_UNLIMITED_MARKS
    group = int(_fanotify_init(flags, os.O_RDONLY | os.O_LARGEFILE | os.O_CLOEXEC))
    if group < 0:
        raise _failed("fanotify_init")
    return group


def mark(group: int, fd: int) -> None:
    """Have reads of the file behind ``fd`` wait for an answer, except through descriptors that are open already.

    EROFS mounts count as those: mount after marking. Marking again changes nothing. The mark keeps the inode in memory,
    and with it the space of a deleted file.

    Raises:
        OSError: EOPNOTSUPP on a file system without pre-content events (they are on ext4, xfs, btrfs); EINVAL from a
            kernel before 6.14.
    """
    _change_mark(group, FAN_MARK_ADD, fd)


def unmark(group: int, fd: int) -> None:
    """Undo :func:`mark`. Events that are queued already stay.

    Raises:
        OSError: ENOENT when there is no mark.
    """
    _change_mark(group, FAN_MARK_REMOVE, fd)


def mark_mount(group: int, fd: int) -> None:
    """Have reads of all files that are opened from now on through the mount of ``fd`` wait for an answer.

    Reads of the same files through any other mount, also a copy of this one, don't. ``fd`` may be of OPEN_TREE_CLONE: a
    mount that is attached nowhere lives as long as a file is open through it, and the mark with it.

    Raises:
        OSError: as :func:`mark`; EMFILE or ENOSPC beyond limits on groups and marks.
    """
    path = b"/proc/self/fd/%d" % fd  # a descriptor that is a path alone (O_PATH) is refused
    if _fanotify_mark(group, FAN_MARK_ADD | FAN_MARK_MOUNT, FAN_PRE_ACCESS, AT_FDCWD, path):
        raise _failed("fanotify_mark")


def marked_mounts(group: int) -> int:
    """How many mounts with a mark of this group there are."""
    with open(f"/proc/self/fdinfo/{group}", "rb") as stream:
        return sum(line.startswith(b"fanotify mnt_id:") for line in stream)


def _change_mark(group: int, flags: int, fd: int) -> None:
    if _fanotify_mark(group, flags, FAN_PRE_ACCESS, fd, None):
        raise _failed("fanotify_mark")


def _failed(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def read(group: int) -> Iterator[Event]:
    """The next events, at most BATCH. They are outstanding from now on: answer each, and close its descriptor.

    Raises:
        BlockingIOError: there are none.
        OSError: EMFILE and others, when the kernel could not make a descriptor: it has denied that one event itself.
        MalformedError: as :func:`events`.
    """
    return events(os.read(group, _BUFFER))


def events(data: bytes) -> Iterator[Event]:
    """The events in what was read from a group.

    Raises:
        MalformedError: the kernel speaks another version, or lengths contradict each other. Events before it have
            been given.
    """
    at, end = 0, len(data)
    while at < end:
        if end - at >= _EVENT.size:
            event_len, vers, _, metadata_len, mask, fd, pid, kind, _, length, _, offset, count = _EVENT.unpack_from(
                data, at
            )
            if (
                event_len == _EVENT.size
                and vers == FANOTIFY_METADATA_VERSION
                and metadata_len == _METADATA_SIZE
                and kind == FAN_EVENT_INFO_TYPE_RANGE
                and length == _RANGE_SIZE
                and mask == FAN_PRE_ACCESS
            ):
                yield Event(fd, pid, offset, count)
                at += event_len
                continue
        event, at = _unusual(data, at)
        yield event


def _unusual(data: bytes, at: int) -> tuple[Event, int]:
    """An event that has no range, or other records as well; and where the next one begins."""
    left = len(data) - at
    if left < _METADATA_SIZE:
        raise MalformedError(f"fanotify event of {left} bytes is shorter than its metadata")
    event_len, vers, _, metadata_len, mask, fd, pid = fanotify_event_metadata.unpack_from(data, at)
    if vers != FANOTIFY_METADATA_VERSION:
        raise MalformedError(f"fanotify events of version {vers}; {FANOTIFY_METADATA_VERSION} is known")
    if not _METADATA_SIZE <= metadata_len <= event_len <= left:
        raise MalformedError(f"fanotify event of {event_len} bytes, metadata of {metadata_len}, in {left}")
    if mask & FAN_Q_OVERFLOW:
        return Event(FAN_NOFD, 0, 0, UNKNOWN), at + event_len
    offset, count = 0, UNKNOWN
    record, end = at + metadata_len, at + event_len
    while record < end:
        if end - record < fanotify_event_info_header.size:
            raise MalformedError(f"fanotify event ends {end - record} bytes into a record")
        kind, _, length = fanotify_event_info_header.unpack_from(data, record)
        if not fanotify_event_info_header.size <= length <= end - record:
            raise MalformedError(f"fanotify record of {length} bytes in {end - record}")
        if kind == FAN_EVENT_INFO_TYPE_RANGE:
            if length < _RANGE_SIZE:
                raise MalformedError(f"fanotify range record of {length} bytes")
            *_, offset, count = fanotify_event_info_range.unpack_from(data, record)
        record += length
    return Event(fd, pid, offset, count), end


def respond(group: int, number: int, allow: bool) -> bool:
    """Let the reader go on, or fail with EIO. False if no event of this number is outstanding."""
    try:
        os.write(group, fanotify_response.pack(number, FAN_ALLOW if allow else FAN_DENY))
    except FileNotFoundError:
        return False
    return True
