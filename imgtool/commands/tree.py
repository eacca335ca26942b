"""``imgtool tree``."""

from __future__ import annotations

import stat
import time

import click

from imgtool import render
from imgtool.options import examples, json_option, open_store, store_option
from layerstore.errors import printable
from layerstore.image import load_image
from layerstore.opened import open_tree
from layerstore.tree.inode import Directory, File, Inode, Special, Symlink, Whiteout, walk
from layerstore.tree.resolve import lookup


@click.command(
    "tree",
    short_help="List files of an image.",
    epilog=examples("imgtool tree repo", "imgtool tree repo /src", "imgtool tree repo-env /usr --depth 1 --json"),
)
@click.argument("name")
@click.argument("path", default="/")
@click.option("--depth", type=click.IntRange(0), help="Levels to go down [default: all].")
@store_option
@json_option
def command(name: str, path: str, depth: int | None, store: str | None, root: str | None, as_json: bool) -> None:
    r"""List what image NAME has at PATH and below, as a sandbox would see it.

    Names keep their bytes: what isn't printable is shown as \xNN, a backslash as \\. A layer over a base, listed
    alone, also shows what it deletes or hides.
    """
    source = open_store(store, root)
    with open_tree(source, load_image(source, name)) as tree:
        start_path = path.encode("utf-8", "surrogateescape")
        start = lookup(tree, start_path)
        prefix = b"/" + start_path.strip(b"/")
        rows = []
        for below, inode in walk(start) if isinstance(start, Directory) else [(b"", start)]:
            if depth is not None and below and below.count(b"/") >= depth:
                continue
            rows.append((printable(prefix.rstrip(b"/") + b"/" + below if below else prefix), inode))
        if as_json:
            render.print_json([_entry(shown, inode) for shown, inode in rows])
            return
        for shown, inode in rows:
            render.print_line(_line(shown, inode))


def _entry(shown: str, inode: Inode) -> dict[str, object]:
    attrs = inode.attrs
    entry: dict[str, object] = {
        "path": shown,
        "mode": f"{attrs.mode:o}",
        "uid": attrs.uid,
        "gid": attrs.gid,
        "mtime": attrs.mtime,
        "mtime_nsec": attrs.nsec,
    }
    if isinstance(inode, File):
        entry["size"] = inode.size
    if isinstance(inode, Symlink):
        entry["target"] = printable(inode.target)
    if isinstance(inode, Special):
        entry["device"] = [inode.major, inode.minor]
    if isinstance(inode, Whiteout):
        entry["deleted"] = True
    if isinstance(inode, Directory) and inode.opaque:
        entry["opaque"] = True
    if attrs.xattrs:
        entry["xattrs"] = {printable(key): value.hex() for key, value in attrs.xattrs}
    return entry


def _line(shown: str, inode: Inode) -> str:
    attrs = inode.attrs
    size = str(inode.size) if isinstance(inode, File) else ""
    if isinstance(inode, Special) and inode.kind in (stat.S_IFCHR, stat.S_IFBLK):
        size = f"{inode.major}, {inode.minor}"
    try:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(attrs.mtime))
    except (ValueError, OverflowError, OSError):
        when = str(attrs.mtime)  # beyond what the calendar of the C library reaches
    arrow = f" -> {printable(inode.target)}" if isinstance(inode, Symlink) else ""
    mark = "  (deleted)" if isinstance(inode, Whiteout) else ""
    if isinstance(inode, Directory) and inode.opaque:
        mark = "  (hides what is below)"
    return f"{stat.filemode(attrs.mode)} {attrs.uid:>5} {attrs.gid:>5} {size:>11} {when} {shown}{arrow}{mark}"
