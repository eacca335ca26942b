"""The formats, by name: what reads and writes them, and which one a file is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layerstore.errors import MalformedError, UsageError
from prefetch.trace.exchange import cvmfs, nri, nydus, overlaybd, own, paths, stargz, strace
from prefetch.trace.exchange.listing import Listing
from prefetch.trace.exchange.parts import Exported, Parts


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another tool.

    Attributes:
        name: for ``--format``.
        description: one line.
        read: takes the bytes and what they are called in messages; None where it can only be written.
        write: None where it can only be read.
        detect: whether bytes are of this format; None where nothing tells it from a list of paths.
    """

    name: str
    description: str
    read: Callable[[bytes, str], Listing] | None = None
    write: Callable[[Parts], Exported] | None = None
    detect: Callable[[bytes], bool] | None = None


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (  # in the order in which they are tried
        Format("imgtool", "a trace of imgtool, of this or another build of the image", own.read_own, None, own.is_own),
        Format(
            "nydus-optimize",
            "JSON of nydus-image and nydusify optimize: paths with ranges",
            nydus.read_optimize,
            nydus.write_optimize,
            nydus.is_optimize,
        ),
        Format(
            "stargz-record",
            "record of ctr-remote optimize: JSON lines",
            stargz.read_record,
            stargz.write_record,
            stargz.is_record,
        ),
        Format("nri-csv", "nydus-snapshotter's optimizer: path,size,elapsed", nri.read_csv, None, nri.is_csv),
        Format("ranges", "CSV with path,offset,length", paths.read_ranges, paths.write_ranges, paths.is_ranges),
        Format("cvmfs-trace", "log of CernVM-FS's tracer", cvmfs.read_trace, None, cvmfs.is_trace),
        Format("strace", "output of strace -f -y -ttt", strace.read_log, None, strace.is_log),
        Format("cvmfs-spec", "specification of cvmfs_shrinkwrap", cvmfs.read_spec, cvmfs.write_spec, cvmfs.is_spec),
        Format("stargz-globs", "list of ctr-remote optimize --prefetch-list", stargz.read_globs, None, stargz.is_globs),
        Format("paths", "a path a line", paths.read_list, paths.write_list, paths.is_list),
        Format("nydus-list", "list of nydus-image --prefetch-policy", nydus.read_list, nydus.write_list),
        Format("nri-list", "nydus-snapshotter's optimizer: a path a line", nri.read_list),
        Format("overlaybd", "priority list of OverlayBD", overlaybd.read_list, overlaybd.write_list),
    )
}
READABLE = tuple(name for name, item in FORMATS.items() if item.read)
WRITABLE = tuple(name for name, item in FORMATS.items() if item.write)
AUTO = "auto"


def detect(data: bytes, what: str) -> Format:
    """The format that ``data`` is of. Lists whose lines are paths are all taken for ``paths``.

    Raises:
        MalformedError: of none that can be told.
    """
    for item in FORMATS.values():
        if item.detect is not None and item.detect(data):
            return item
    raise MalformedError(f"{what}: its format can't be told; say which it is: {', '.join(READABLE)}")


def read_listing(data: bytes, name: str, what: str, *, strip: bytes = b"") -> tuple[Format, Listing]:
    """What a file of format ``name``, or ``auto``, asks for.

    Args:
        data: all of it.
        name: see FORMATS.
        what: what it is called in messages.
        strip: a directory; where a path begins with it, the rest is the path in the image.

    Raises:
        UsageError: no such format, or one that can only be written.
        LimitError: larger than what is read of this format.
        MalformedError: not of this format, or without any path.
        UnsupportedError: of another version of it.
    """
    item = detect(data, what) if name == AUTO else FORMATS.get(name)
    if item is None or item.read is None:
        raise UsageError(f"nothing reads format {name!r}; choose of {', '.join(READABLE)}")
    listing = item.read(data, what)
    if not listing.wanted:
        reasons = "; ".join(f"{count} {reason}" for reason, count in listing.skipped.items())
        raise MalformedError(f"{what} names no path as {item.name}" + (f": skipped {reasons}" if reasons else ""))
    if prefix := strip.strip(b"/"):
        below = prefix + b"/"
        listing.wanted = [
            wanted._replace(path=wanted.path[len(below) :]) if wanted.path.startswith(below) else wanted
            for wanted in listing.wanted
        ]
    return item, listing


def write_parts(parts: Parts, name: str) -> Exported:
    """The file of format ``name``.

    Raises:
        UsageError: no such format, or one that can only be read.
    """
    item = FORMATS.get(name)
    if item is None or item.write is None:
        raise UsageError(f"nothing writes format {name!r}; choose of {', '.join(WRITABLE)}")
    return item.write(parts)
