"""``imgtool export``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from imgtool import progress, render
from imgtool.options import examples, jobs_option, json_option, open_store, store_option
from layerstore.errors import UsageError
from layerstore.export.compress import Compression
from layerstore.export.containerd import Form, export_containerd
from layerstore.export.contentcache import CachedLayer, export_cache
from layerstore.export.exported import Exported
from layerstore.export.ociimage import export_image
from layerstore.export.targetname import open_target
from layerstore.oci.platform import Platform

if TYPE_CHECKING:
    from layerstore.store.protocol import Store

_CACHE = "cache:"


@click.command(
    "export",
    short_help="Write an image for others: containerd, or whatever takes OCI images.",
    epilog=examples(
        "imgtool export repo-env oci:./out:repo-env",
        "imgtool export repo-env oci-archive:repo-env.tar --compression zstd",
        "imgtool export repo-env --for containerd oci:./out:repo-env-erofs",
        "imgtool export repo-env --for containerd --form 2.1 oci:./out:repo-env-2.1",
        "imgtool export repo-env --for containerd docker://registry.example.com/repo-env:1",
        "imgtool export repo-env --for containerd cache:/mnt/shared/layers",
    ),
)
@click.argument("name")
@click.argument("target")
@click.option(
    "--for", "reader", type=click.Choice(["containerd"]), help="Write EROFS layers, for its EROFS snapshotter."
)
@click.option(
    "--form", type=click.Choice([form.value for form in Form]), help="containerd's release: 2.1 or 2.3 [default: 2.3]."
)
@click.option(
    "--compression",
    type=click.Choice([compression.value for compression in Compression]),
    help="Of the layers [default: gzip; for containerd zstd, or none in form 2.1].",
)
@click.option("--platform", metavar="OS/ARCH[/VARIANT]", help="Platform of an image that names none.")
@jobs_option
@store_option
@json_option
def command(
    name: str,
    target: str,
    reader: str | None,
    form: str | None,
    compression: str | None,
    platform: str | None,
    jobs: int,
    store: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Write image NAME as TARGET.

    TARGET is oci:DIR[:TAG], an OCI layout, oci-archive:FILE[:TAG], a tar of one, or docker://REFERENCE, an image in a
    registry.

    Without --for, it becomes an ordinary image of tar layers. With --for containerd, each layer becomes one EROFS file,
    which its EROFS snapshotter mounts; TARGET may then be cache:DIR too, a directory for its layer_content_caches.
    """
    if reader is None and form is not None:
        raise UsageError("--form is containerd's: give --for containerd too")
    packing = Compression(compression) if compression else None
    machine = Platform.parse(platform) if platform else None
    if target.startswith(_CACHE):
        if reader is None or form or packing or machine:
            raise UsageError("cache:DIR goes with --for containerd, and without --form, --compression and --platform")
        if target == _CACHE:
            raise UsageError("cache: needs a path: cache:DIR")
        _fill_cache(open_store(store, root), name, target.removeprefix(_CACHE), jobs, as_json)
        return
    written = open_target(target)
    source = open_store(store, root)
    with progress.shown() as drawn, written:
        if reader is None:
            exported = export_image(
                source,
                name,
                written,
                compression=packing or Compression.GZIP,
                platform=machine,
                jobs=jobs,
                progress=drawn,
                warn=render.warn,
            )
        else:
            exported = export_containerd(
                source,
                name,
                written,
                form=Form(form or Form.V2_3),
                compression=packing,
                platform=machine,
                jobs=jobs,
                progress=drawn,
                warn=render.warn,
            )
    if as_json:
        render.print_json(_document(exported, target))
        return
    size = sum(layer.descriptor.size for layer in exported.layers)
    raw = sum(layer.raw_size for layer in exported.layers)
    render.print_line(f"{target}: {exported.manifest.digest}")
    render.print_line(f"  {len(exported.layers)} layer(s), {render.size(size)}; {render.size(raw)} uncompressed")


def _document(exported: Exported, target: str) -> dict[str, object]:
    return {
        "target": target,
        "manifest": str(exported.manifest.digest),
        "layers": [
            {
                "media_type": layer.descriptor.media_type,
                "digest": str(layer.descriptor.digest),
                "diff_id": str(layer.diff_id),
                "bytes": layer.descriptor.size,
                "bytes_raw": layer.raw_size,
            }
            for layer in exported.layers
        ],
    }


def _fill_cache(store: Store, name: str, directory: str, jobs: int, as_json: bool) -> None:
    with progress.shown() as drawn:
        layers = export_cache(store, name, directory, jobs=jobs, progress=drawn, warn=render.warn)
    if as_json:
        render.print_json({"target": f"{_CACHE}{directory}", "layers": [_cached(layer) for layer in layers]})
        return
    for layer in layers:
        state = "written" if layer.written else "there already"
        render.print_line(f"{render.size(layer.size)} {state}: {', '.join(map(str, layer.diff_ids))}")


def _cached(layer: CachedLayer) -> dict[str, object]:
    return {
        "diff_ids": [str(diff_id) for diff_id in layer.diff_ids],
        "bytes": layer.size,
        "written": layer.written,
    }
