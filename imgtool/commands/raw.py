"""``imgtool raw``."""

from __future__ import annotations

import click

from imgtool import progress, render
from imgtool.options import examples, json_option, store_option, whole_store
from layerstore.rawpacks import RawState, plan_removal, publish_raw, remove_raw


@click.command(
    "raw",
    short_help="Store the packs of images raw too, for --mode direct.",
    epilog=examples(
        "imgtool raw repo-env --store /mnt/nfs/store",
        "imgtool raw repo-env --remove",
    ),
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--remove", is_flag=True, help="Remove raw packs that no other image uses; the compressed ones stay.")
@store_option
@json_option
def command(names: tuple[str, ...], remove: bool, store: str | None, root: str | None, as_json: bool) -> None:
    """Store every pack of the images raw, besides compressed, so that nodes can mount it from a shared file system.

    Packs that are raw already are hashed, and replaced where they are damaged.
    """
    target = whole_store(store, root)
    if remove:
        packs = remove_raw(target, plan_removal(target, names))
    else:
        with progress.shown() as drawn:
            packs = publish_raw(target, names, progress=drawn)
    if as_json:
        render.print_json(
            [
                {
                    "pack": str(pack.digest),
                    "bytes": pack.size,
                    "state": str(pack.state),
                    "needed_by": list(pack.users),
                }
                for pack in packs
            ]
        )
        return
    for pack in packs:
        needed = f", needed by {', '.join(pack.users)}" if pack.users else ""
        render.print_line(f"{pack.digest}  {render.size(pack.size)}  {pack.state}{needed}")
    changed = [pack for pack in packs if pack.state in (RawState.STORED, RawState.REMOVED)]
    verb = "removed" if remove else "stored raw"
    render.print_line(f"{len(changed)} pack(s), {render.size(sum(pack.size for pack in changed))}, {verb}")
