"""``imgtool cat``."""

from __future__ import annotations

import base64
import sys

import click

from imgtool import render
from imgtool.options import examples, open_store, store_option
from layerstore.content import read_range
from layerstore.errors import UsageError, printable
from layerstore.image import load_image
from layerstore.opened import open_tree
from layerstore.tree.inode import File
from layerstore.tree.resolve import lookup

_STEP = 1 << 20


@click.command(
    "cat",
    short_help="Print a file of an image.",
    epilog=examples("imgtool cat repo /src/a.py", "imgtool cat debian-full /etc/os-release"),
)
@click.argument("name")
@click.argument("path")
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print path, size and base64 of the content.")
def command(name: str, path: str, store: str | None, root: str | None, as_json: bool) -> None:
    """Print the bytes of file PATH of image NAME; symbolic links are followed inside the image."""
    source = open_store(store, root)
    with open_tree(source, load_image(source, name)) as tree:
        inode = lookup(tree, path.encode("utf-8", "surrogateescape"))
        if not isinstance(inode, File):
            raise UsageError(f"{printable(path)} in {name!r} is no regular file")
        if as_json:
            data = read_range(inode, 0, inode.size)
            render.print_json({"path": printable(path), "size": inode.size, "base64": base64.b64encode(data).decode()})
            return
        out = sys.stdout.buffer
        for offset in range(0, inode.size, _STEP):
            out.write(read_range(inode, offset, min(_STEP, inode.size - offset)))
        out.flush()
