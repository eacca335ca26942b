"""Moves a blob into its spool: two threads, so that decompression and hashing take a core each.

::

    pump: read ─▶ hash the blob ─▶ decompress ─▶ queue (bounded) ─▶ sink: append to the spool ─▶ hash the tar

The pump never ends before the blob does, unless something fails: what follows the last member counts for size and
digest. The calls that take time (read, hash, decompress, write) release the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from layerstore.digest import Digest
from layerstore.errors import CorruptError, LimitError, MalformedError, os_errors
from layerstore.limits import Limits
from layerstore.tar.compression import Compression, decompress
from layerstore.tar.spool import Spool

PIECE = 1 << 17  # bytes read at a time
_QUEUED = 16  # pieces between pump and sink
_PATIENCE = 1.0  # seconds that close() gives a read that does not return


class Readable(Protocol):
    """A binary stream, as far as it is used here."""

    def read(self, size: int, /) -> bytes | None: ...


class Promise(NamedTuple):
    """What the descriptor of a blob says, as far as it is known."""

    digest: Digest | None
    size: int | None


class LayerDigests(NamedTuple):
    """What a layer turned out to be. ``diff_id`` and ``diff_size`` are of the decompressed tar."""

    blob_digest: Digest
    blob_size: int
    diff_id: Digest
    diff_size: int


class Meter:
    """The blob on its way in: counted, hashed, and stopped one byte behind its promised size."""

    def __init__(
        self, stream: Readable, head: bytes, promise: Promise, progress: Callable[[int], None] | None = None
    ) -> None:
        self._stream = stream
        self._head = head
        self._promise = promise
        self._progress = progress
        self._hasher = hashlib.new(promise.digest.algorithm if promise.digest is not None else "sha256")
        self.size = 0

    def pull(self) -> bytes:
        """The next piece, empty at the end.

        Raises:
            CorruptError: the blob is longer or shorter than promised.
        """
        data, self._head = self._head, b""
        promised = self._promise.size
        if not data:
            with os_errors("read layer"):
                data = self._stream.read(PIECE if promised is None else min(PIECE, promised + 1 - self.size)) or b""
        self.size += len(data)
        if promised is not None and (self.size > promised or (not data and self.size < promised)):
            actual = f"more than {promised}" if self.size > promised else str(self.size)
            raise CorruptError("layer blob has another size than its descriptor", expected=str(promised), actual=actual)
        if data:
            self._hasher.update(data)
            if self._progress is not None:
                self._progress(len(data))
        return data

    @property
    def digest(self) -> Digest:
        return Digest(self._hasher.name, self._hasher.hexdigest())

    def check(self) -> None:
        """Read what is left, and compare with what was promised.

        Raises:
            CorruptError: it is another blob.
        """
        while self.pull():
            pass
        if self._promise.digest is not None:
            self._promise.digest.check(self._hasher, "layer blob has another digest than its descriptor")

    @property
    def promised(self) -> bool:
        return self._promise != (None, None)


class Pump:
    """The two threads.

    Args:
        meter: the blob.
        compression: what is done to it.
        spool: where the tar goes; None if the blob is a plain file that needs no copy.
        limits: bounds on the tar's size and the decoder's window.
        algorithm: of the tar's digest.
    """

    def __init__(
        self, meter: Meter, compression: Compression, spool: Spool | None, *, limits: Limits, algorithm: str
    ) -> None:
        self._meter = meter
        self._compression = compression
        self._spool = spool
        self._limits = limits
        same = compression is Compression.NONE and algorithm == meter.digest.algorithm
        self._hasher = None if same else hashlib.new(algorithm)
        self._size = 0
        self._error: BaseException | None = None
        self._stopped = False  # nobody wants the rest
        self._skim = False  # the layer is refused, only the blob's digest still matters
        self._done = threading.Event()
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._pump_thread = threading.Thread(target=self._pump, name="layer-pump", daemon=True)
        self._sink_thread = threading.Thread(target=self._sink, name="layer-sink", daemon=True)

    def start(self) -> None:
        self._sink_thread.start()
        self._pump_thread.start()

    def finish(self) -> LayerDigests:
        """Wait for the end of the blob.

        Raises:
            ImgtoolError: what went wrong on the way.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        blob = self._meter.digest
        diff_id = blob if self._hasher is None else Digest(self._hasher.name, self._hasher.hexdigest())
        return LayerDigests(blob, self._meter.size, diff_id, self._size)

    def blame(self) -> None:
        """The layer can't be read: raise CorruptError if that is because the blob isn't what was promised."""
        if self._meter.promised:
            self._skim = True
            self._done.wait()
            if isinstance(self._error, CorruptError):
                raise self._error

    def close(self) -> bool:
        """End the threads. False: one still waits for the blob's stream, and ends when its read returns."""
        self._stopped = True
        self._pump_thread.join(_PATIENCE)
        stuck = self._pump_thread.is_alive()
        if stuck:
            self._queue.put(None)
        self._sink_thread.join()
        return not stuck

    # the threads

    def _pump(self) -> None:
        try:
            for piece in self._pieces():
                self._size += len(piece)
                if self._size > self._limits.layer_bytes:
                    limit = self._limits.layer_bytes
                    raise LimitError(f"layer is more than {limit} bytes when decompressed, which is the limit")
                if self._stopped:
                    return
                if self._skim:
                    break
                if self._spool is not None or self._hasher is not None:
                    self._queue.put(piece)
            self._meter.check()
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._queue.put(None)

    def _pieces(self) -> Iterator[bytes]:
        """The tar in pieces; damage is the blob's if its own digest is wrong too."""
        try:
            yield from decompress(self._meter.pull, self._compression, memory=self._limits.decoder_memory)
        except MalformedError:
            if self._meter.promised:
                self._meter.check()
            raise

    def _sink(self) -> None:
        while (piece := self._queue.get()) is not None:
            if self._stopped:
                continue  # the pump must not wait for room
            try:
                if self._spool is not None:
                    self._spool.append(piece)
                if self._hasher is not None:
                    self._hasher.update(piece)
            except BaseException as error:
                self._error = self._error or error
                self._stopped = True
        if self._spool is not None:
            # Only now, behind everything that could still be read: the reader's view doesn't depend on timing.
            if self._error is not None:
                self._spool.fail(self._error)
            else:
                self._spool.end()
        self._done.set()
