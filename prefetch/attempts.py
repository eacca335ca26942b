"""What has been tried for a frame, and what is tried next. Every course ends.

A wrong answer is asked for once more from the same place, then the next place is asked; one that lacks the pack, or
refuses it, is not asked again. A place that can't answer now makes the next one be asked, and when all have been, the
round starts again after a pause.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerstore.cache.format import Origin
from layerstore.errors import CorruptError, ImgtoolError, MalformedError, NotFoundError, UnavailableError

ANSWERS = 2
"""Wrong answers that are taken from one place: a fault on the way may pass, one in the store doesn't."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds. Doubled after each round; half of each is left to chance, so that the nodes of a fleet don't ask in step."""


class Attempts:
    """Those at one frame, from its first failure on.

    Attributes:
        rounds: how often every place that may still have the frame could not answer.
        last: the latest error.
    """

    __slots__ = ("_answers", "_out", "_tired", "last", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        self.last: ImgtoolError | None = None
        self._answers: dict[Origin, int] = {}
        self._out: dict[Origin, ImgtoolError] = {}
        self._tired: set[Origin] = set()

    def open_to(self, origins: Sequence[Origin]) -> list[Origin]:
        """The places to be asked in this round, in order."""
        return [origin for origin in origins if origin not in self._out and origin not in self._tired]

    @property
    def alone(self) -> bool:
        """Whether the frame is to be read by itself: one that is wrong would take its neighbours along."""
        return bool(self._answers)

    def failed(
        self, origin: Origin | None, error: ImgtoolError, origins: Sequence[Origin], chance: float
    ) -> float | None:
        """Learn from a failure at ``origin`` (None: on this node), of all the ``origins`` there are.

        Frames that failed together are given the same ``chance``, from 0 to 1, and so the same pause. Returns the
        seconds to wait before the next attempt, or None if there is nothing left to try.
        """
        self.last = error
        if isinstance(error, UnavailableError):
            if origin is not None:
                self._tired.add(origin)
        elif origin is None:
            return None
        elif isinstance(error, CorruptError | MalformedError):
            self._answers[origin] = self._answers.get(origin, 0) + 1
            if self._answers[origin] >= ANSWERS:
                self._out[origin] = error
        else:
            self._out[origin] = error
        if all(each in self._out for each in origins) and (origin is not None or not origins):
            return None
        if origin is not None and self.open_to(origins):
            return 0.0
        self.rounds += 1
        self._tired.clear()
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self.rounds - 1))
        return pause * (1 + chance) / 2

    def verdict(self, what: str, sha256: bytes) -> ImgtoolError:
        """The error of a frame that can't be had: missing only if it is missing everywhere.

        Args:
            what: frame and pack.
            sha256: what the frame's raw bytes should come to.
        """
        wrong = [error for error in self._out.values() if isinstance(error, CorruptError)]
        if wrong:
            last = wrong[-1]
            places = ", ".join(origin.location for origin in self._answers)
            text = str(last) if what in str(last) else f"{what}: {last}"
            if sha256.hex() not in text:
                text += f"; sha256:{sha256.hex()} was expected"
            count = sum(self._answers.values())
            error = CorruptError(f"{text}; asked {count} times ({places}): publish it again")
            error.expected, error.actual = f"sha256:{sha256.hex()}", last.actual
            return error
        others = [error for error in self._out.values() if not isinstance(error, NotFoundError)]
        return next(reversed(others or [*self._out.values()]), None) or self.last or NotFoundError(f"{what}: no store")
