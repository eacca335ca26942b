"""Where a file's data lies: the value that packing computes, the writer stores and the reader gives back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from layerstore.digest import Digest

HOLE = 0xFFFF_FFFF_FFFF_FFFF
"""An address that stands for a chunk of zeros that is stored nowhere."""


def address(device: int, block: int) -> int:
    """``block`` (4 KiB units, from the start of that device) of ``device`` (1 is the first of the device table)."""
    return device << 32 | block


@dataclass(slots=True)
class Chunked:
    """A chunk-based file: piece i of ``4096 << bits`` bytes is at ``addresses[i]`` (array of 'Q').

    The last piece takes only as many blocks as it has data; a device holds whole blocks, padded with zeros.
    """

    bits: int
    addresses: array[int]


@dataclass(frozen=True, slots=True)
class Device:
    """An extra device: the pack with this digest, ``blocks`` of 4 KiB long."""

    digest: Digest
    blocks: int
