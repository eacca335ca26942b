"""Time, as the fetcher sees it: passed in, so that tests decide how it goes by."""

from __future__ import annotations

import time
from threading import Condition
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back. Deadlines are points on this clock."""

    def now(self) -> float: ...

    def wait(self, condition: Condition, until: float | None) -> None:
        """Wait, as the holder of ``condition``, until it is notified or the time has come; may return early."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC, which all processes of the machine share."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: Condition, until: float | None) -> None:
        condition.wait(None if until is None else max(0.0, until - time.monotonic()))
