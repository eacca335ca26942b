"""``imgtool plan fetch``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, json_option, open_store, root_path, store_option
from layerstore.errors import CorruptError, NotFoundError, printable
from layerstore.image import load_image
from prefetch.plans.published import fetch_all, join
from prefetch.plans.shelf import Shelf


@click.command(
    "fetch",
    short_help="Get the plans of an image's layers from a store.",
    epilog=examples(
        "imgtool plan fetch debian-full",
        "imgtool plan fetch debian-full --name debian-full --store https://images.example.com/store",
    ),
)
@click.argument("image")
@click.option("--name", metavar="NAME", help="Make one plan of them, under this name [default: keep them by layer].")
@store_option
@json_option
def command(image: str, name: str | None, store: str | None, root: str | None, as_json: bool) -> None:
    """Put the plans that a store has for the layers of IMAGE (a tag or a digest) on this node.

    `imgtool up` does so by itself, beside a start; with them here it need not ask.
    """
    source = open_store(store, root)
    layers = [layer.metadata for layer in load_image(source, image).layers]
    found = fetch_all(source, layers)
    for text in found.damaged:
        render.warn(f"a plan was left out: {text}")
    if not found.plans:
        if found.damaged:
            raise CorruptError(f"no plan of the {len(layers)} layer(s) of {image!r} in {source.location} can be read")
        raise NotFoundError(
            f"{source.location} has no plan for any of the {len(layers)} layer(s) of {image!r}: publish one"
        )
    shelf = Shelf(root_path(root))
    if name is not None:
        shelf.save(join(found.plans, name))
    else:
        for plan in found.plans:
            shelf.keep(plan.parts[0].metadata, plan)
        for layer in found.missing:
            shelf.keep(layer, None)
    if as_json:
        render.print_json(
            {
                "name": name,
                "layers": [
                    {
                        "layer": str(plan.parts[0].metadata),
                        "name": plan.name,
                        "ranges": len(plan.parts[0].ranges),
                        "bytes": plan.parts[0].bytes,
                    }
                    for plan in found.plans
                ],
                "missing": [str(layer) for layer in found.missing],
                "damaged": list(found.damaged),
            }
        )
        return
    for plan in found.plans:
        part = plan.parts[0]
        render.print_line(
            f"{part.metadata.hex[:12]}  {printable(plan.name)}: {len(part.ranges)} ranges, {render.size(part.bytes)}"
        )
    for layer in found.missing:
        render.print_line(f"{layer.hex[:12]}  no plan")
