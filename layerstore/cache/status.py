"""What a cache tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What is in the cache; sizes are bytes allocated on disk.

    Attributes:
        bytes: of everything in it.
        limit: how many it may have; what is used or pinned stays nonetheless.
        packs: how many.
        metadata_images: how many.
        in_use_bytes: of what somebody uses.
        pinned_bytes: of what is pinned.
        evicted_bytes: since the cache was opened.
        unverified_frames: recorded before an unclean stop and not looked at since.
        rejected_frames: found wrong since the cache was opened.
        discarded_packs: thrown away as damaged since the cache was opened.
    """

    bytes: int
    limit: int | None
    packs: int
    metadata_images: int
    in_use_bytes: int
    pinned_bytes: int
    evicted_bytes: int
    unverified_frames: int
    rejected_frames: int
    discarded_packs: int
