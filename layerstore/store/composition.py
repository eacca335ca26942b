"""How the wrappers of stores are put together: here, and nowhere else.

::

    steady(store)         single-flight ▶ caching ▶ retrying ▶ store      for whoever reads a store himself
    mirrored(locations)   failover ▶ verified ▶ late ▶ each mirror        a location ``A|B``

Retries are around the mirrors, so that the next mirror is asked before there is any pause. Each mirror is verified
below the failover, which so learns which of them is wrong. The node's fetcher (``prefetch``) retries, verifies and
chooses by itself, frame by frame, and its cache is on disk: it takes stores as they are, mirrors among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from layerstore.errors import ImgtoolError, NotFoundError, UnsupportedError, UsageError
from layerstore.store.caching import CachingStore
from layerstore.store.failover import FailoverStore
from layerstore.store.late import LateStore
from layerstore.store.protocol import Store
from layerstore.store.retrying import RetryingStore, Wait
from layerstore.store.singleflight import SingleFlightStore
from layerstore.store.verified import VerifiedStore


def patient(store: Store, *, wait: Wait = time.sleep) -> Store:
    """``store``, asked again where it is unavailable for a moment, unless it is so already."""
    return store if isinstance(store, SingleFlightStore | RetryingStore) else RetryingStore(store, wait=wait)


def steady(store: Store, *, wait: Wait = time.sleep) -> Store:
    """``store`` for whoever reads many documents, some of them often, by many threads."""
    if isinstance(store, SingleFlightStore):
        return store
    return SingleFlightStore(CachingStore(patient(store, wait=wait)))


def mirrored(locations: Sequence[str], opener: Callable[[str], Store]) -> Store:
    """One store of those at ``locations``, the first first. They are opened as they are needed, the first of them now.

    Args:
        locations: one or more.
        opener: opens one of them, as :func:`layerstore.store.opening.open_store` does.

    Raises:
        UnsupportedError, UsageError: no such location, or what is there can't be used.
        NotFoundError: no store is at any of them.
        UnavailableError, PermissionError_, CorruptError: none can be used, and this is why one of them can't.
    """
    mirrors = [LateStore(location, opener) for location in locations]
    store = FailoverStore([VerifiedStore(mirror) for mirror in mirrors])
    errors: list[ImgtoolError] = []
    for mirror in mirrors:
        try:
            mirror.opened()
            break
        except (UnsupportedError, UsageError):
            raise
        except ImgtoolError as error:
            errors.append(error)
    else:
        raise next((error for error in errors if not isinstance(error, NotFoundError)), errors[0])
    return store
