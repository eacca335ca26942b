"""``imgtool ls``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, json_option, open_store, store_option
from layerstore.attachment import Artifact
from layerstore.errors import printable
from layerstore.listing import list_images
from prefetch.plans.format import PLAN_MEDIA_TYPE
from prefetch.plans.published import PLAN_NAME


@click.command(
    "ls",
    short_help="List the images of a store.",
    epilog=examples(
        "imgtool ls", "imgtool ls --store /mnt/images --json", "imgtool ls --store https://images.example.com/store"
    ),
)
@click.option("--all", "everything", is_flag=True, help="Also what is no image: plans of layers.")
@store_option
@json_option
def command(everything: bool, store: str | None, root: str | None, as_json: bool) -> None:
    """List every name with its roles and sizes, and how many of its layers have a plan.

    SIZE is what the image needs of the store, ITS OWN what no other listed image shares.
    """
    listing = list_images(open_store(store, root))
    listed = listing.images
    artifacts = listing.artifacts if everything else ()
    if as_json:
        render.print_json(
            [
                {
                    "name": item.name,
                    "manifest": str(item.manifest) if item.manifest else None,
                    "roles": [role.value for role in item.roles],
                    "bytes": item.size,
                    "bytes_own": item.own_size,
                    "error": item.error,
                    "plans": [str(layer) for layer in item.planned],
                }
                for item in listed
            ]
            + [
                {
                    "name": item.name,
                    "manifest": str(item.manifest),
                    "type": item.artifact.artifact_type,
                    "layer": str(item.artifact.layer) if item.artifact.layer else None,
                    "bytes": item.size,
                    "annotations": dict(item.artifact.annotations),
                }
                for item in artifacts
            ]
        )
        return
    planned = any(item.planned for item in listed)
    rows = [
        (
            item.name,
            item.error or "+".join(item.roles),
            render.size(item.size),
            render.size(item.own_size),
            *([f"{len(item.planned)} of {len(item.layers)}" if item.planned else ""] if planned else []),
            item.manifest.hex[:12] if item.manifest else "",
        )
        for item in listed
    ]
    rows += [
        (
            item.name,
            _described(item.artifact),
            render.size(item.size),
            render.size(item.size),
            *([""] if planned else []),
            item.manifest.hex[:12],
        )
        for item in artifacts
    ]
    headings = ("NAME", "ROLES", "SIZE", "ITS OWN", *(["PLANS"] if planned else []), "MANIFEST")
    render.print_table(headings, rows, right=frozenset({2, 3}))


def _described(artifact: Artifact) -> str:
    if artifact.artifact_type != PLAN_MEDIA_TYPE:
        return printable(artifact.artifact_type)
    return f"plan {printable(artifact.annotations.get(PLAN_NAME, ''))}"
