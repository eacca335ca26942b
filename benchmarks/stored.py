"""What ten point releases of one image take in a store, by several tools."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.harness import blob, fresh, imgtool, parser, save, table, tags, timed, tool, tree_size


def releases(layout: Path) -> list[str]:
    return sorted((tag for tag in tags(layout) if tag != "base"), key=lambda tag: [int(n) for n in tag.split(".")])


def layers(layout: Path) -> dict[str, int]:
    """Digest and size of each distinct layer."""
    found = {}
    for entry in json.loads((layout / "index.json").read_text())["manifests"]:
        manifest = json.loads(blob(layout, entry["digest"]).read_text())
        found |= {layer["digest"]: layer["size"] for layer in manifest["layers"]}
    return found


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    work = fresh(arguments.work)
    layout = arguments.images / "django"
    sizes: dict[str, int | None] = {"OCI layers, gzip, each once": sum(layers(layout).values())}

    def convert(store: Path, tag: str, role: str, *more: str) -> None:
        timed(imgtool("convert", f"oci:{layout}:{tag}", "--role", role, "--store", str(store), "--tag", tag, *more))

    split = work / "split"
    convert(split, "base", "base")
    for tag in releases(layout):
        convert(split, tag, "workspace", "--base", "base")
    sizes["imgtool, a base and ten workspaces"] = tree_size(split / "blobs")
    whole = work / "whole"
    for tag in releases(layout):
        convert(whole, tag, "base")
    sizes["imgtool, ten whole bases"] = tree_size(whole / "blobs")

    desync = tool("desync")
    sizes["desync chunk store, an index a layer"] = None
    if desync:
        chunks = fresh(work / "desync")
        for digest in layers(layout):
            name = digest[7:19]
            subprocess.run(f"zcat < {blob(layout, digest)} > {work / name}", shell=True, check=True)
            subprocess.run(
                [desync, "make", "-s", str(chunks), str(work / f"{name}.caibx"), str(work / name)],
                check=True,
                capture_output=True,
            )
            (work / name).unlink()
        sizes["desync chunk store, an index a layer"] = tree_size(chunks) + sum(
            path.stat().st_size for path in work.glob("*.caibx")
        )

    mkfs = tool("mkfs.erofs")
    for label, options in (
        ("mkfs.erofs -Ededupe, an image a layer", "-Ededupe"),
        ("mkfs.erofs -zzstd -Ededupe, an image a layer", "-zzstd,3 -C65536 -Ededupe"),
    ):
        sizes[label] = None
        if mkfs:
            total = 0
            for digest in layers(layout):
                image = work / "image.erofs"
                image.unlink(missing_ok=True)
                timed(f"zcat < {blob(layout, digest)} | {mkfs} --quiet {options} --tar=f {image}")
                total += image.stat().st_size
            sizes[label] = total

    smallest = min(size for size in sizes.values() if size)
    table(
        ("store", "bytes", "of the smallest"),
        [
            (name, f"{size:,}" if size else "not there", f"{size / smallest:.2f}" if size else "")
            for name, size in sizes.items()
        ],
    )
    save(arguments.json, {"stored": sizes})
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
