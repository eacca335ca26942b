"""Our own traces, of another build of the image: by path, with ranges, times and waits."""

from __future__ import annotations

from prefetch.trace.exchange.listing import Kind, Listing, Wanted
from prefetch.trace.exchange.parts import NAMELESS
from prefetch.trace.format import MAGIC, parse_trace
from prefetch.trace.naming import raw_path


def is_own(data: bytes) -> bool:
    return data.startswith(b'{"magic":"%b"' % MAGIC.encode())


def read_own(data: bytes, what: str) -> Listing:
    """Raises LimitError, MalformedError or UnsupportedError."""
    trace = parse_trace(data, what)
    listing = Listing()
    for reason, count in trace.unknown.items():
        listing.skipped[reason] = count
    for access in trace.accesses:
        if access.path is None:
            listing.skip(NAMELESS)
            continue
        listing.add(
            Wanted(
                raw_path(access.path),
                Kind.FILE,
                ((access.file_offset, access.length),),
                at=access.at,
                waited=access.waited,
                comm=access.comm,
            )
        )
    return listing
