"""``imgtool plan publish``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, existing_store, json_option, store_option
from imgtool.planfile import load_plan
from layerstore.attachment import attachment_name
from layerstore.errors import printable
from prefetch.plans.published import publish


@click.command(
    "publish",
    short_help="Put a plan into a store, beside the layers.",
    epilog=examples("imgtool plan publish numpy", "imgtool plan publish numpy.json --store /mnt/images"),
)
@click.argument("plan", metavar="NAME|FILE")
@store_option
@json_option
def command(plan: str, store: str | None, root: str | None, as_json: bool) -> None:
    """Make a plan that of its layers in the store, for all nodes and all images that have these layers.

    A layer has one plan; the one that it has is replaced. An image that has the layers has to be there. Copies of an
    image take its plans along, and gc removes those of layers that no image has any more.
    """
    target = existing_store(store, root)
    loaded = load_plan(plan, root)
    published = publish(target, loaded)
    layers = [part.metadata for part in loaded.parts]
    if as_json:
        render.print_json(
            {
                "name": loaded.name,
                "plan": str(loaded.digest),
                "layers": [
                    {"layer": str(layer), "tag": attachment_name(layer), "manifest": str(descriptor.digest)}
                    for layer, descriptor in zip(layers, published, strict=True)
                ],
            }
        )
        return
    render.print_line(f"{printable(loaded.name)} is the plan of {len(layers)} layer(s) in {target.location}")
    for layer, part in zip(layers, loaded.parts, strict=True):
        render.print_line(f"  {layer.hex[:12]}  {len(part.ranges)} ranges, {render.size(part.bytes)}")
