"""Converting one gzip layer: unpack, hash, deduplicate, compress, publish; against what only unpacks and lays out."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.harness import (
    HEADINGS,
    Run,
    fresh,
    imgtool,
    interleaved,
    layer_of,
    median,
    parser,
    rows,
    save,
    table,
    timed,
    tool,
)


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    work = fresh(arguments.work)
    layout = arguments.images / "debian"
    layer = layer_of(layout, "full")
    print(f"layer: {layer.stat().st_size / 1e6:.0f} MB of gzip, {layer}\n")
    mkfs = tool("mkfs.erofs")

    def ours(source: str, store: Path, *more: str) -> Run:
        return timed(imgtool("convert", source, "--role", "base", "--store", str(store), *more))

    def convert() -> Run:
        return ours(f"tar:{layer}", fresh(work / "store"))

    def rival(options: str) -> Run:
        image = work / "image.erofs"
        image.unlink(missing_ok=True)
        return timed(f"zcat < {layer} | {mkfs} --quiet {options} --tar=f {image}")

    arms = {"imgtool convert": convert}
    if mkfs:
        arms["zcat | mkfs.erofs --tar=f"] = lambda: rival("")
        arms["zcat | mkfs.erofs -zzstd --tar=f"] = lambda: rival("-zzstd,3")
    runs = interleaved(arms, arguments.rounds)
    table(HEADINGS, rows(runs))
    own = median(runs["imgtool convert"])
    for name, of in runs.items():
        if of is not runs["imgtool convert"]:
            print(f"\n{name} takes {median(of) / own:.2f} times as long")
    if not mkfs:
        print("\nmkfs.erofs isn't there: scripts/setup test installs it")

    seed = fresh(work / "seed")
    ours(f"oci:{layout}:full", seed, "--tag", "full")

    def changed() -> Run:
        store = work / "changed"
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(seed, store)
        return ours(f"oci:{layout}:changed", store, "--tag", "changed")

    def afresh() -> Run:
        return ours(f"oci:{layout}:changed", fresh(work / "afresh"), "--tag", "changed")

    print("\nA build that changed 5 % of its bytes, whole image of two layers:\n")
    rebuilt = interleaved({"over the last build": changed, "afresh": afresh}, arguments.rounds)
    table(HEADINGS, rows(rebuilt))
    print(f"\nafresh takes {median(rebuilt['afresh']) / median(rebuilt['over the last build']):.2f} times as long")
    save(arguments.json, {"convert": runs, "changed": rebuilt})
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
