"""Errors of the operating system, as a directory store reports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from layerstore.errors import NotFoundError, UnavailableError, from_os_error


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """As :func:`layerstore.errors.os_errors`, but a file that isn't there is a failure of the store.

    A directory of the store may have been unmounted, or an unfinished file removed by a collector whose host shares no
    locks with this one. Whoever looks for something that may be missing handles FileNotFoundError first.
    """
    try:
        yield
    except OSError as error:
        mapped = from_os_error(error, what)
        if isinstance(mapped, NotFoundError):
            mapped = UnavailableError(f"{mapped}: is the store still mounted?")
        raise mapped from error
