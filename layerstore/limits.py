"""Bounds on what input may ask for; every one can be raised by the caller."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one conversion.

    Attributes:
        layer_bytes: decompressed size of one layer.
        entries: members of all layers together.
        file_bytes: logical size of one file, holes included.
        index_bytes: of the chunk indexes of all files, which are in memory; what a few terabytes of holes take.
        decoder_memory: bytes the xz and zstd decoders may use for their window.
    """

    layer_bytes: int = 256 * GIB
    entries: int = 10_000_000
    file_bytes: int = 16 * 1024 * GIB
    index_bytes: int = 128 << 20
    decoder_memory: int = 1 << 30


DEFAULT_LIMITS = Limits()
