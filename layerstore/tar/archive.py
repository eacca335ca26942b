"""A layer archive: the members, the data and the digests of one layer blob."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import BinaryIO

from layerstore.digest import Digest
from layerstore.errors import LimitError, MalformedError, UnsupportedError, UsageError, os_errors
from layerstore.limits import DEFAULT_LIMITS, Limits
from layerstore.tar.compression import SNIFFED, Compression, sniff
from layerstore.tar.member import Member
from layerstore.tar.pump import PIECE, LayerDigests, Meter, Promise, Pump, Readable
from layerstore.tar.reader import MemberReader
from layerstore.tar.spool import Spool
from layerstore.tree.inode import ByteSource


class LayerArchive:
    """One layer, read once. A context manager; the threads and the spool live as long as its block.

    A plain tar that is a regular file is read where it lies; it must not change meanwhile. Everything else is spooled.

    Args:
        source: a path, or a binary stream, which stays open. Give an unbuffered one for standard input, so that an
            interrupted program need not wait for it.
        scratch: directory for the spool, which takes the layer's decompressed size there.
        warn: receives one line for each survivable oddity of the archive.
        limits: bounds on entries, file sizes, the decompressed size and the decoder's memory.
        expected: digest of the blob; a mismatch is a CorruptError, in place of whatever it would look like otherwise.
        expected_size: size of the blob; not one byte is read beyond the one that proves it wrong.
        diff_algorithm: of the diff ID to compute.
        progress: receives the number of bytes of each piece of the blob that was consumed, in the pump's thread.
    """

    def __init__(
        self,
        source: Readable | str | bytes | os.PathLike[str],
        *,
        scratch: str,
        warn: Callable[[str], None],
        limits: Limits = DEFAULT_LIMITS,
        expected: Digest | None = None,
        expected_size: int | None = None,
        diff_algorithm: str = "sha256",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._input = source
        self._scratch = scratch
        self._warn = warn
        self._limits = limits
        self._promise = Promise(expected, expected_size)
        self._diff_algorithm = diff_algorithm
        self._progress = progress
        self._spool: Spool | None = None
        self._pump: Pump | None = None
        self._file: BinaryIO | None = None
        self._compression = Compression.NONE

    def __enter__(self) -> LayerArchive:
        with ExitStack() as undo:
            undo.callback(self.close)
            self._open()
            undo.pop_all()
        return self

    def _open(self) -> None:
        stream: Readable
        plain_size = None
        if isinstance(self._input, (str, bytes, os.PathLike)):
            with os_errors("open layer"):
                stream = self._file = open(self._input, "rb", buffering=0)  # noqa: SIM115 - close() ends it
                status = os.fstat(self._file.fileno())
            if stat.S_ISREG(status.st_mode):
                plain_size = status.st_size
        else:
            stream = self._input
        head = _head(stream, self._promise.size)
        self._compression = sniff(head)
        meter = Meter(stream, head, self._promise, self._progress)
        if self._file is not None and plain_size is not None and self._compression is Compression.NONE:
            if plain_size > self._limits.layer_bytes:
                raise LimitError(f"layer is {plain_size} bytes; {self._limits.layer_bytes} are the limit")
            self._spool = Spool.over(self._file, plain_size)
            sunk = None
        else:
            self._spool = sunk = Spool.create(self._scratch)
        self._pump = Pump(meter, self._compression, sunk, limits=self._limits, algorithm=self._diff_algorithm)
        self._pump.start()

    @property
    def compression(self) -> Compression:
        """What the blob's first bytes say; compare it with what the media type claims."""
        return self._compression

    @property
    def source(self) -> ByteSource:
        """The decompressed layer, to which the members' runs refer. Reads wait for what has not come yet."""
        return self._opened()[0]

    def members(self) -> Iterator[Member]:
        """Every member, in the archive's order, as soon as its header has been decompressed.

        Raises:
            MalformedError: the archive breaks the format, or is cut short.
            LimitError: it asks for more than the limits allow.
            UnsupportedError: it needs something that is not implemented.
            CorruptError: the blob isn't the expected one.
        """
        spool, pump = self._opened()
        try:
            yield from MemberReader(spool.read, limits=self._limits, warn=self._warn)
        except (MalformedError, UnsupportedError):
            pump.blame()
            raise

    def finish(self) -> LayerDigests:
        """Read the blob to its end, whatever follows the last member, and tell its digests.

        Raises:
            CorruptError: the blob isn't the expected one.
            ImgtoolError: reading, decompressing or spooling it has failed.
        """
        return self._opened()[1].finish()

    def _opened(self) -> tuple[Spool, Pump]:
        if self._spool is None or self._pump is None:
            raise UsageError("the layer archive is not open")
        return self._spool, self._pump

    def close(self) -> None:
        """End the threads and free the spool; idempotent."""
        pump, spool, file = self._pump, self._spool, self._file
        self._pump = self._spool = self._file = None
        ended = pump is None or pump.close()
        if spool is not None:
            spool.close()
        if file is not None and ended:  # a descriptor that a thread still reads must not be reused
            file.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def _head(stream: Readable, promised: int | None) -> bytes:
    """The first piece of the blob, long enough to tell its compression unless the blob is shorter."""
    most = PIECE if promised is None else min(PIECE, promised + 1)
    head = b""
    with os_errors("read layer"):
        while len(head) < min(SNIFFED, most) and (data := stream.read(most - len(head))):
            head += data
    return head
