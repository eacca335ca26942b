"""``imgtool dump``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, json_option, open_store, store_option
from layerstore.erofs.dump import dump
from layerstore.errors import UsageError
from layerstore.image import load_image
from layerstore.opened import open_layer


@click.command(
    "dump",
    short_help="Print a metadata image, annotated, byte by byte.",
    epilog=examples("imgtool dump repo", "imgtool dump repo-env --layer 2 | less"),
)
@click.argument("name")
@click.option(
    "--layer", type=click.IntRange(0), default=0, show_default=True, help="Position in the stack, bottom is 0."
)
@store_option
@json_option
def command(name: str, layer: int, store: str | None, root: str | None, as_json: bool) -> None:
    """Print the metadata image of image NAME: superblock, devices, and every inode with its place."""
    source = open_store(store, root)
    image = load_image(source, name)
    if layer >= len(image.layers):
        raise UsageError(f"{name!r} has layers 0 to {len(image.layers) - 1}")
    with open_layer(source, image.layers[layer]) as opened:
        lines = dump(opened.image)
        if as_json:
            render.print_json({"layer": str(opened.layer.metadata), "lines": list(lines)})
            return
        for line in lines:
            render.print_line(line)
