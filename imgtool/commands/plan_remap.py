"""``imgtool plan remap``."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace

import click

from imgtool import render
from imgtool.learning import matched
from imgtool.options import examples, json_option, open_store, root_path, store_option
from imgtool.planfile import load_plan
from layerstore.errors import ConflictError, ImgtoolError, printable
from layerstore.image import Image, find_target, load_image
from layerstore.store.protocol import Store
from prefetch.plans.format import Plan
from prefetch.plans.shelf import Shelf


@click.command(
    "remap",
    short_help="Make a plan of one build serve another.",
    epilog=examples(
        "imgtool plan remap django --to django:4.2.2",
        "imgtool plan remap django --to django:4.2.2 --from-image django:4.2.1 --name django",
    ),
)
@click.argument("plan", metavar="NAME|FILE")
@click.option("--to", required=True, metavar="IMAGE", help="The build that it is to serve.")
@click.option(
    "--from-image", metavar="IMAGE", help="The build that it is of, for ranges without a path [default: as it says]."
)
@click.option("--name", metavar="NAME", help="Of the new plan [default: the old one's and the image's].")
@store_option
@json_option
def command(
    plan: str,
    to: str,
    from_image: str | None,
    name: str | None,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Find what a plan fetches in another build of its image, and keep that as a new plan.

    What the packs of the new build still have is found by pack, the rest by path. The new plan has no score: what was
    lost is said instead.
    """
    from prefetch.learn.remap import remap_plan  # with what learns, which few commands need
    from prefetch.trace.places import open_places

    shelf = Shelf(root_path(root))
    loaded = load_plan(plan, root)
    new_name = name or _name(loaded.name, to)
    shelf.path(new_name)  # a wrong name is said before the work
    source = open_store(store, root)
    target = find_target(source, to)
    with ExitStack() as stack:
        new = stack.enter_context(open_places(source, load_image(source, to)))
        old = _old(source, loaded, from_image)
        places = None if old is None else stack.enter_context(open_places(source, old))
        remapped, report = remap_plan(loaded, places, new)
    if not remapped.parts:
        raise ConflictError(f"nothing that plan {plan!r} fetches is in {to!r}: it is of another image")
    made = replace(remapped, name=new_name, image=to, manifest=str(target.digest))
    path = shelf.save(made)
    if as_json:
        render.print_json(
            {"name": new_name, "path": printable(path), "plan": str(made.digest), "match": report.to_json()}
        )
    else:
        render.print_line(f"{new_name}: {matched(report)}")


def _old(source: Store, plan: Plan, name: str | None) -> Image | None:
    """The image that was named, or that the plan names where it is there; None where no range needs it."""
    if name is not None:
        return load_image(source, name)
    if all(planned.path is not None for part in plan.parts for planned in part.ranges):
        return None
    for own in (plan.manifest, plan.image):
        try:
            if own:
                return load_image(source, own)
        except ImgtoolError:
            continue  # then these ranges are found by pack alone
    return None


def _name(old: str, image: str) -> str:
    """Both names, with what a plan's name may not have as dashes: ``django-django-4.2.2``."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{old}-{image.removeprefix(f'{old}:')}")
