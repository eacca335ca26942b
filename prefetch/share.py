"""How much of the link to the stores the background may take: as much as keeps the queue on the link short.

A reader's frame shares the link with all that is under way. A link that waits for stores more than for bytes takes any
number of reads; on a slow one, a few long reads are seconds that everybody would wait for. How long the queue is shows
in how much longer answers take than the quickest: while that is less than it may be, the window of bytes under way
grows, up to twofold each turn; else it shrinks. (LEDBAT, RFC 6817, does the same for packets.)

All stores count as behind one link. A value without locks or time of its own, as the backlog is.
"""

from __future__ import annotations

ALONE_SECONDS = 0.1
"""So long is the queue on the link at most, when no reader has demanded anything for a while that nobody planned."""
BESIDE_SECONDS = 0.025
"""While readers do. Less would be within what a busy machine adds to answers by itself."""
QUIET_SECONDS = 0.5
"""So long after the last such demand the background counts as alone again."""
FIRST_WINDOW = 1 << 20
"""Bytes, until something is known: a tenth of a second at 80 Mbit/s. A dozen frames, of which the first come alone."""
LARGEST_WINDOW = 64 << 20
PARTS = 4
"""Long reads that fit into the window: while one is worked on, others are under way."""
DRIFT = 0.0001
"""Share of its distance by which the quickest turn comes nearer to each answer: links change."""


class Share:
    """Watches what is under way, and says how much may be.

    Attributes:
        window: bytes that may be under way, those of readers included.
        under_way: bytes that were asked for and have not come.
    """

    def __init__(self) -> None:
        self.window = float(FIRST_WINDOW)
        self.under_way = 0
        self._turn: float | None = None

    @property
    def part(self) -> float:
        """Bytes of the longest read that may be made."""
        return self.window / PARTS

    @property
    def has_room(self) -> bool:
        """Whether such a read fits in: with what little is left there would be many short ones."""
        return self.under_way + self.part <= self.window

    def started(self, size: int) -> None:
        """So many bytes were asked for."""
        self.under_way += size

    def arrived(self, size: int, seconds: float, *, beside: bool) -> None:
        """They came after so many seconds; ``beside``: readers demand."""
        turn = seconds if self._turn is None else min(seconds, self._turn + DRIFT * (seconds - self._turn))
        self._turn = turn
        allowed = BESIDE_SECONDS if beside else ALONE_SECONDS
        free = max(-1.0, (allowed - (seconds - turn)) / allowed)
        # A window that nobody fills tells nothing.
        if free < 0 or self.under_way >= self.window / 2 or size >= self.part / 2:
            self.window = min(LARGEST_WINDOW, max(1.0, self.window + free * size))
        self.under_way -= size

    def lost(self, size: int) -> None:
        """They did not come."""
        self.under_way -= size
        self.window = max(1.0, self.window / 2)
