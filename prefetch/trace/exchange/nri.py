"""What the optimizer plugin of nydus-snapshotter writes: a list of paths, and beside it ``.csv`` with sizes and times.

The list has a path a line, in the order of first access: at = position. The CSV has the columns path, size in bytes
and elapsed in microseconds; with the plugin's ``readable`` the last two are such as ``1.5 MiB`` and ``12.345 ms``.
"""

from __future__ import annotations

from prefetch.trace.exchange.listing import TOO_LONG, Kind, Listing, Wanted, fits, lines, number, records

HEADER = [b"path", b"size", b"elapsed"]
_SIZES = {b"B": 1} | {bytes([letter]) + b"iB": 1 << 10 * power for power, letter in enumerate(b"KMGTPE", 1)}
_TIMES = {b"us": 1, b"ms": 1_000, b"s": 1_000_000}


def read_list(data: bytes, what: str) -> Listing:
    """Raises LimitError."""
    listing = Listing()
    for line in lines(data, what):
        if line.startswith(b"/"):
            listing.add_path(line)
        elif line:
            listing.skip("not an absolute path")
    return listing


def is_csv(data: bytes) -> bool:
    return data.partition(b"\n")[0].strip() == b",".join(HEADER)


def read_csv(data: bytes, what: str) -> Listing:
    """Raises LimitError or MalformedError."""
    listing = Listing()
    for record in records(data, HEADER, listing, what):
        path, size, elapsed = record
        at = _quantity(elapsed, _TIMES)
        if not path.startswith(b"/"):
            listing.skip("not an absolute path")
        elif not fits(path):
            listing.skip(TOO_LONG)
        elif at is None:
            listing.skip("no time")
        else:
            listing.add(Wanted(path.lstrip(b"/"), Kind.FILE, at=at, size=_quantity(size, _SIZES)))
    return listing


def _quantity(text: bytes, units: dict[bytes, int]) -> int | None:
    """A plain number, or one with a unit and at most three places behind the dot."""
    plain = number(text)
    if plain is not None:
        return plain
    value, _, unit = text.partition(b" ")
    whole, _, fraction = value.partition(b".")
    factor, digits = units.get(unit), number(whole + fraction[:3].ljust(3, b"0"))
    if factor is None or digits is None or (fraction and not fraction.isdigit()):
        return None
    return number(b"%d" % (digits * factor // 1000))
