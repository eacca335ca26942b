"""Several requests at a time, where a store is far away: the next answers are on their way while one is looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

THREADS = 16
_WAITING = 4
"""Answers for each thread that may wait to be looked at: memory is that of a few documents."""

T = TypeVar("T")
R = TypeVar("R")


def ahead(function: Callable[[T], R], items: Iterable[T], *, threads: int = THREADS) -> Iterator[tuple[T, R]]:
    """Each item and what the function makes of it, in their order; ``function`` is called by several threads.

    The first error comes in its turn, and ends it: what is under way then is done, and no more is begun. So is it
    where the caller wants no more. With one thread, the caller calls the function himself.
    """
    if threads == 1:
        for item in items:
            yield item, function(item)
        return
    left = iter(items)
    first = list(islice(left, 2))
    if len(first) < 2:  # the usual case, which needs no threads
        for item in first:
            yield item, function(item)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="ahead") as pool:
        try:
            pending: deque[tuple[T, Future[R]]] = deque((item, pool.submit(function, item)) for item in first)
            pending.extend((item, pool.submit(function, item)) for item in islice(left, threads * _WAITING))
            while pending:
                item, future = pending.popleft()
                result = future.result()
                pending.extend((more, pool.submit(function, more)) for more in islice(left, 1))
                yield item, result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
