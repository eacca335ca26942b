"""What is known of a repository without asking again: for a while, and never instead of a verification."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError
from layerstore.oci import mediatype
from layerstore.oci.manifest import Index, parse_document
from layerstore.registry.manifests import Stored

TRUST_SECONDS = 300.0
"""For which a blob that was there, or was written, is believed to be there still."""
KEPT_BYTES = 16 << 20
"""Of documents that have been read by tag and will be asked for by digest."""
KNOWN = 100_000
"""Digests that are remembered."""

V = TypeVar("V")


class Knowledge:
    """Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._there: OrderedDict[Digest, tuple[int, float]] = OrderedDict()
        self._missing: OrderedDict[Digest, float] = OrderedDict()
        self._manifests: OrderedDict[Digest, None] = OrderedDict()
        self._kept: OrderedDict[Digest, bytes] = OrderedDict()
        self._kept_bytes = 0

    def saw(self, digest: Digest, size: int, *, manifest: bool = False) -> None:
        """A blob or manifest is there."""
        with self._lock:
            self._there[digest] = size, self._clock()
            self._there.move_to_end(digest)
            self._missing.pop(digest, None)
            _bound(self._there)
            if manifest:
                self._note(digest)

    def has(self, digest: Digest, size: int | None = None) -> bool:
        """Whether it was there a short while ago, with that size."""
        with self._lock:
            found = self._there.get(digest)
        return found is not None and size in (None, found[0]) and self._clock() - found[1] < TRUST_SECONDS

    def missed(self, digest: Digest) -> None:
        """It isn't there."""
        with self._lock:
            self._missing[digest] = self._clock()
            self._missing.move_to_end(digest)
            _bound(self._missing)

    def is_missing(self, digest: Digest) -> bool:
        """Whether it was missing a short while ago: who wants to write it need not look."""
        with self._lock:
            return self._clock() - self._missing.get(digest, float("-inf")) < TRUST_SECONDS

    def doubt(self, digests: Iterable[Digest]) -> None:
        """The registry says that they are missing, whatever it said before."""
        with self._lock:
            for digest in digests:
                self._there.pop(digest, None)
                self._manifests.pop(digest, None)

    def is_manifest(self, digest: Digest) -> bool:
        """Whether it is one as far as anybody knows."""
        with self._lock:
            return digest in self._manifests

    def keep(self, stored: Stored) -> None:
        """A document that was read by tag: whoever asks for it by digest next gets it."""
        digest, size = stored.descriptor.digest, stored.descriptor.size
        self.saw(digest, size, manifest=True)
        with self._lock:
            self._kept_bytes += size - len(self._kept.pop(digest, b""))
            self._kept[digest] = stored.data
            while self._kept_bytes > KEPT_BYTES and self._kept:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])
        if stored.descriptor.media_type in mediatype.INDEXES:
            self._note_children(stored)

    def take(self, digest: Digest) -> bytes | None:
        """A kept document, once."""
        with self._lock:
            data = self._kept.pop(digest, None)
            self._kept_bytes -= len(data or b"")
            return data

    def _note(self, digest: Digest) -> None:
        self._manifests[digest] = None
        self._manifests.move_to_end(digest)
        _bound(self._manifests)

    def _note_children(self, stored: Stored) -> None:
        try:
            document = parse_document(stored.data, stored.descriptor.media_type)
        except ImgtoolError:
            return  # whoever reads it says what is wrong with it
        if isinstance(document, Index):
            with self._lock:
                for each in document.manifests:
                    self._note(each.digest)


def _bound(known: OrderedDict[Digest, V]) -> None:
    while len(known) > KNOWN:
        known.popitem(last=False)
