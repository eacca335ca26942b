"""``imgtool convert``."""

from __future__ import annotations

import click

from imgtool import progress, render
from imgtool.options import examples, jobs_option, json_option, store_option, writable_store
from imgtool.planfile import chance, check_plan_targets, keep_plan, layout_options, load_plan
from layerstore.convert import Conversion, Report, convert
from layerstore.errors import UsageError
from layerstore.image import Role
from layerstore.limits import DEFAULT_LIMITS, GIB, Limits
from layerstore.oci.platform import Platform
from layerstore.oci.source_name import SourceName
from layerstore.pack.writer import DEFAULT_LEVEL
from prefetch.plans.relaid import Fitted, hot_files, replanned


@click.command(
    "convert",
    short_help="Turn an OCI image, archive or directory into a layer, and publish it.",
    epilog=examples(
        "imgtool convert oci:./debian:full --role base --tag debian-full",
        "imgtool convert oci-archive:repo.tar --role workspace --base debian-full --tag repo",
        "imgtool convert tree:./tools --role toolkit --tag tools",
        "imgtool convert oci:./debian:full --role base --tag debian-full --raw --store /mnt/nfs/store",
        "imgtool convert oci:./debian:next --role base --tag debian-next --plan numpy --save-plan numpy-next",
        "zcat layer.tar.gz | imgtool convert tar:- --role base --tag scratch",
    ),
)
@click.argument("source")
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True, help="What the layer is for.")
@click.option("--tag", metavar="NAME", help="Name to publish it under; without, it is known by its digest only.")
@click.option("--base", metavar="NAME", help="Base in the store that the source was built on.")
@click.option("--rebase", is_flag=True, help="The source was not built on --base: compute the difference.")
@click.option("--platform", metavar="OS/ARCH[/VARIANT]", help="Which image of an index [default: this machine's].")
@click.option(
    "--no-dedup", is_flag=True, help="Refer to no other layer's packs: the digests depend on the source alone."
)
@click.option("--raw", is_flag=True, help="Store its packs raw too, for --mode direct.")
@click.option("--plan", metavar="PLAN", help="What is read first by this plan comes first: a file, or a name here.")
@layout_options
@click.option("--level", type=click.IntRange(1, 19), default=DEFAULT_LEVEL, show_default=True, help="zstd level.")
@click.option("--max-layer-gib", type=click.IntRange(1), help="Refuse layers that unpack to more [default: 256].")
@click.option("--max-entries", type=click.IntRange(1), help="Refuse images of more entries [default: 10000000].")
@click.option("--max-file-gib", type=click.IntRange(1), help="Refuse files larger than that [default: 16384].")
@jobs_option
@store_option
@json_option
def command(
    source: str,
    role: str,
    tag: str | None,
    base: str | None,
    rebase: bool,
    platform: str | None,
    no_dedup: bool,
    raw: bool,
    plan: str | None,
    min_chance: float,
    plan_out: str | None,
    save_plan: str | None,
    level: int,
    max_layer_gib: int | None,
    max_entries: int | None,
    max_file_gib: int | None,
    jobs: int,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Convert SOURCE into a layer and publish it.

    SOURCE is oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:TAG], docker://HOST/REPOSITORY[:TAG] (an
    image in a registry), tar:FILE (- for standard input), or tree:DIR. A base or an image without --base collapses all
    layers; with --base, only what the image adds to the base is kept, and what it deletes.
    """
    limits = Limits(
        layer_bytes=max_layer_gib * GIB if max_layer_gib else DEFAULT_LIMITS.layer_bytes,
        entries=max_entries or DEFAULT_LIMITS.entries,
        file_bytes=max_file_gib * GIB if max_file_gib else DEFAULT_LIMITS.file_bytes,
    )
    if plan is None and (plan_out or save_plan or min_chance):
        raise UsageError("--plan-out, --save-plan and --min-chance are about a plan: name it with --plan")
    check_plan_targets(file=plan_out, name=save_plan, root=root)
    planned = None if plan is None else load_plan(plan, root)
    conversion = Conversion(
        SourceName.parse(source),
        Role(role),
        base=base,
        rebase=rebase,
        platform=Platform.parse(platform) if platform else None,
        dedup=not no_dedup,
        level=level,
        jobs=jobs,
        limits=limits,
        raw=raw,
        hot=hot_files(planned, chance(min_chance)) if planned else (),
    )
    target = writable_store(store, root)
    with progress.shown() as drawn:
        report = convert(conversion, target, tag=tag, progress=drawn, warn=render.warn)
    new_plan = None
    if planned is not None and (plan_out or save_plan):
        new_plan = replanned(target, report.image, planned, name=tag or "")
        keep_plan(new_plan.plan, file=plan_out, name=save_plan, root=root)
    if as_json:
        render.print_json(_document(report, tag, new_plan))
    else:
        _print(report, tag)


def _document(report: Report, tag: str | None, new_plan: Fitted | None) -> dict[str, object]:
    document: dict[str, object] = {
        "manifest": str(report.manifest),
        "tag": tag,
        "role": report.layer.role.value,
        "layer": str(report.layer.metadata),
        "base": str(report.layer.base) if report.layer.base else None,
        "entries": report.entries,
        "bytes_in": report.source_size,
        "bytes_data": report.data_size,
        "bytes_new": report.new_size,
        "bytes_shared": report.shared_size,
        "bytes_stored": report.stored_size,
        "bytes_metadata": report.layer.metadata_size,
        "packs": [str(pack.digest) for pack in report.layer.packs],
        "warnings": list(report.warnings),
    }
    if hot := report.hot:
        document["hot"] = {
            "bytes": hot.size,
            "chunks": hot.chunks,
            "frames": hot.frames,
            "bytes_copied": hot.copied_size,
            "matched": hot.matched,
            "unmatched": dict(hot.unmatched),
        }
    if new_plan is not None:
        document["plan"] = {
            "digest": str(new_plan.plan.digest),
            "ranges": sum(len(part.ranges) for part in new_plan.plan.parts),
            "remapped": new_plan.matched.to_json() if new_plan.matched else None,
        }
    return document


def _print(report: Report, tag: str | None) -> None:
    layer = report.layer
    render.print_line(f"{tag or report.manifest}: {layer.role}, {report.entries} entries")
    render.print_line(
        f"  read {render.size(report.source_size)}; data {render.size(report.data_size)}: "
        f"{render.size(report.new_size)} new, {render.size(report.shared_size)} shared; "
        f"stored {render.size(report.stored_size)} more"
    )
    render.print_line(
        f"  metadata image {render.size(layer.metadata_size)}, {len(layer.packs)} pack(s); manifest {report.manifest}"
    )
    if hot := report.hot:
        ranges = f"{hot.matched} of {hot.matched + sum(hot.unmatched.values())} planned ranges"
        copied = f", {render.size(hot.copied_size)} of it although other packs have it" if hot.copied_size else ""
        render.print_line(f"  {ranges} come first: {render.size(hot.size)} in {hot.frames} frames{copied}")
