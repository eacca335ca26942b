"""``imgtool ls``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.options import examples, json_option, open_store, store_option
from layerstore.listing import list_images


@click.command(
    "ls",
    short_help="List the images of a store.",
    epilog=examples(
        "imgtool ls", "imgtool ls --store /mnt/images --json", "imgtool ls --store https://images.example.com/store"
    ),
)
@store_option
@json_option
def command(store: str | None, root: str | None, as_json: bool) -> None:
    """List every name with its roles and sizes.

    SIZE is what the image needs of the store, ITS OWN what no other listed image shares.
    """
    listed = list_images(open_store(store, root))
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
                }
                for item in listed
            ]
        )
        return
    render.print_table(
        ("NAME", "ROLES", "SIZE", "ITS OWN", "MANIFEST"),
        [
            (
                item.name,
                item.error or "+".join(item.roles),
                render.size(item.size),
                render.size(item.own_size),
                item.manifest.hex[:12] if item.manifest else "",
            )
            for item in listed
        ],
        right=frozenset({2, 3}),
    )
