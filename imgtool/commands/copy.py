"""``imgtool copy``."""

from __future__ import annotations

import click

from imgtool import progress, render
from imgtool.options import examples, jobs_option, json_option
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore


@click.command(
    "copy",
    short_help="Copy an image to another store.",
    epilog=examples(
        "imgtool copy repo-env /var/lib/imgtool/store /mnt/shared/store",
        "imgtool copy repo /mnt/a /mnt/b --as repo:from-a --replace",
    ),
)
@click.argument("name")
@click.argument("source", metavar="STORE")
@click.argument("destination", metavar="STORE2")
@click.option("--as", "rename", metavar="NEW", help="Name in STORE2 [default: the same].")
@click.option("--replace", is_flag=True, help="Move the name where STORE2 has it for another image.")
@jobs_option
@json_option
def command(
    name: str, source: str, destination: str, rename: str | None, replace: bool, jobs: int, as_json: bool
) -> None:
    """Copy image NAME from STORE to STORE2: only the blobs that are missing there, verified on the way."""
    with progress.shown() as drawn:
        copied = copy(
            name,
            DirectoryStore(source),
            DirectoryStore.create(destination),
            rename=rename,
            replace=replace,
            jobs=jobs,
            progress=drawn,
        )
    if as_json:
        render.print_json(
            {
                "tag": rename or name,
                "manifest": str(copied.target.digest),
                "blobs_copied": copied.blobs,
                "bytes_copied": copied.bytes,
                "blobs_present": copied.present,
            }
        )
    else:
        render.print_line(
            f"{rename or name}: copied {copied.blobs} blob(s), {render.size(copied.bytes)}; "
            f"{copied.present} were there already"
        )
