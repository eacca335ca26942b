"""``imgtool tag``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, existing_store, json_option, store_option
from layerstore.errors import about
from layerstore.image import find_target, parse_image, read_document
from layerstore.publish import Publisher, current


@click.command(
    "tag",
    short_help="Give an image another name.",
    epilog=examples("imgtool tag repo repo:2026-11", "imgtool tag sha256:… rescued"),
)
@click.argument("name")
@click.argument("new")
@store_option
@json_option
def command(name: str, new: str, store: str | None, root: str | None, as_json: bool) -> None:
    """Make NEW stand for the image that NAME (a tag or digest) stands for; NEW is moved where it exists."""
    target_store = existing_store(store, root)
    target = find_target(target_store, name)
    data = read_document(target_store, target, f"manifest of {name!r}")
    with about(repr(name)):
        image = parse_image(data)
    with target_store.lease() as lease:
        before = current(target_store, new)
        Publisher(target_store, lease).reference(new, target, image, expected=before)
    if as_json:
        render.print_json({"tag": new, "manifest": str(target.digest)})
    else:
        render.print_line(f"{new}: {target.digest}")
