"""``imgtool copy``."""

from __future__ import annotations

import click

from imgtool import progress, render
from imgtool.options import examples, jobs_option, json_option, write_store
from layerstore.image import layers_of
from layerstore.oci.descriptor import Descriptor
from layerstore.rawpacks import RawPack, RawState, packs_of, require_local, store_raw
from layerstore.store.copying import CopiedPlans, copy, copy_plans
from layerstore.store.opening import open_store
from layerstore.store.protocol import Lease


@click.command(
    "copy",
    short_help="Copy an image to another store.",
    epilog=examples(
        "imgtool copy repo-env /var/lib/imgtool/store /mnt/shared/store",
        "imgtool copy repo /mnt/a /mnt/b --as repo:from-a --replace",
        "imgtool copy repo-env ./store /mnt/nfs/store --raw",
        "imgtool copy repo-env https://images.example.com/store ./store",
    ),
)
@click.argument("name")
@click.argument("source", metavar="STORE")
@click.argument("destination", metavar="STORE2")
@click.option("--as", "rename", metavar="NEW", help="Name in STORE2 [default: the same].")
@click.option("--replace", is_flag=True, help="Move the name where STORE2 has it for another image.")
@click.option("--no-plans", is_flag=True, help="Leave the plans of its layers behind.")
@click.option("--raw", is_flag=True, help="Store its packs raw in STORE2 too, for --mode direct.")
@jobs_option
@json_option
def command(
    name: str,
    source: str,
    destination: str,
    rename: str | None,
    replace: bool,
    no_plans: bool,
    raw: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Copy image NAME from STORE to STORE2: only the blobs that are missing there, verified on the way.

    What has arrived stays: after a failure, run it again to go on. For many images there is `imgtool sync`.

    The plans of its layers come along. Where STORE2 has another plan for a layer, that one stays, but for --replace.

    Raw packs are never copied: --raw makes them in STORE2 from what was copied, before the name is there.
    """
    source_store = open_store(source)  # first: where there is no source, no destination is made
    target_store = write_store(destination, create=True)
    if raw:
        require_local(target_store)
    stored: list[RawPack] = []

    def store_packs(target: Descriptor, lease: Lease) -> None:
        if raw:
            packs = packs_of(target_store, [str(target.digest)])
            stored.extend(store_raw(target_store, packs, lease, progress=drawn))

    with progress.shown() as drawn:
        copied = copy(
            name,
            source_store,
            target_store,
            rename=rename,
            replace=replace,
            jobs=jobs,
            progress=drawn,
            complete=store_packs,
        )
        plans = CopiedPlans()
        if not no_plans:
            layers = layers_of(target_store, copied.target)
            plans = copy_plans(layers, source_store, target_store, replace=replace, progress=drawn)
    for text in plans.failed:
        render.warn(f"a plan was left behind: {text}")
    bytes_raw = sum(pack.size for pack in stored if pack.state is RawState.STORED)
    if as_json:
        render.print_json(
            {
                "tag": rename or name,
                "manifest": str(copied.target.digest),
                "blobs_copied": copied.blobs,
                "bytes_copied": copied.bytes,
                "blobs_present": copied.present,
                "bytes_raw": bytes_raw,
                "plans_copied": len(plans.copied),
                "plans_present": len(plans.present),
                "plans_kept": len(plans.kept),
                "plans_failed": len(plans.failed),
            }
        )
    else:
        render.print_line(
            f"{rename or name}: copied {copied.blobs} blob(s), {render.size(copied.bytes)}; "
            f"{copied.present} were there already"
        )
        if plans.copied or plans.kept:
            stayed = f"; {len(plans.kept)} layer(s) keep the plan that they have there" if plans.kept else ""
            render.print_line(f"  {len(plans.copied)} plan(s) came along{stayed}")
        if raw:
            render.print_line(f"  {len(stored)} pack(s) are stored raw, {render.size(bytes_raw)} of them new")
