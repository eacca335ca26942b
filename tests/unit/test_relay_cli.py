"""``optimize``, and ``convert --plan``, by command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.relays import hot, same
from support.tars import file, tar

from imgtool.cli import run
from imgtool.exitcodes import ExitCode
from layerstore.errors import printable
from layerstore.image import load_image
from layerstore.pack.format import FRAME_SIZE
from layerstore.rawpacks import is_raw
from prefetch.plans.format import Plan, PlannedRange, PlanPart, order, parse_plan
from prefetch.plans.shelf import Shelf

A, C = noise(90_000, 1), noise(4 * FRAME_SIZE, 3)
LAYER = tar(file("a", A), file("lib/big", C), file("z", noise(50_000, 4)))


class Shell:
    """Commands in this process, on a store with one image, ``it``, and a plan for it in ``plan.json``."""

    def __init__(self, site: Site, capture: pytest.CaptureFixture[str]) -> None:
        self.site = site
        self._capture = capture
        self.source = site.image([LAYER])
        self.root = site.path / "root"
        site.convert(self.source, tag="it")
        (layer,) = load_image(site.store, "it").layers
        found = []
        for due, (path, offset) in enumerate([(b"lib/big", 900_000), (b"z", 0), (b"lib/big", 300_000), (b"a", 20_000)]):
            for each in hot(site.store, layer, (path, offset, 1)):
                where = each.device, each.offset, each.length
                found.append(PlannedRange(*where, due, 10_000 - due, printable(path), offset // 16_384 * 16_384))
        packs = tuple(pack.digest for pack in layer.packs)
        self.plan = Plan((PlanPart(layer.metadata, packs, order(found)),), name="start")
        self.file = site.path / "plan.json"
        self.file.write_bytes(self.plan.to_bytes())

    def __call__(self, *arguments: str, code: int = 0) -> str:
        self._capture.readouterr()
        got = run(arguments)
        out, err = self._capture.readouterr()
        assert got == code, err
        return out if code == 0 else err

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("IMGTOOL_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("IMGTOOL_STORE", str(tmp_path / "store"))
    with fsync_for_free():
        yield Shell(Site(tmp_path), capsys)


def test_optimize(shell: Shell) -> None:
    out = shell("optimize", "it", "--plan", str(shell.file), "--tag", "hot")
    lines = out.splitlines()
    assert lines[0] == "hot: 4 of 4 planned ranges, 65.5 kB in 4 chunks, come first"
    assert lines[1].startswith("  before: 4 frames, 2 reads of ") and lines[2].startswith(
        "  after:  1 frames, 1 reads of "
    )
    assert lines[3].startswith("  stored ") and ", 65.5 kB of data twice; manifest sha256:" in lines[3]
    same(shell.site, "it", "hot")


def test_optimize_as_json(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "new.json"
    document = shell.json(
        "optimize",
        "it",
        "--plan",
        str(shell.file),
        "--tag",
        "hot",
        "--plan-out",
        str(out),
        "--save-plan",
        "fast",
        "--raw",
    )
    assert list(document) == [
        *("manifest", "tag", "layers", "bytes_hot", "bytes_copied", "bytes_stored", "chunks", "matched", "unmatched"),
        *("remapped", "unlikely", "before", "after", "plan"),
    ]
    image = load_image(shell.site.store, "hot")
    assert document["manifest"] == str(image.descriptor().digest)
    assert document["layers"] == [
        {
            "role": "base",
            "before": str(load_image(shell.site.store, "it").layers[0].metadata),
            "layer": str(image.layers[0].metadata),
            "packs": [str(pack.digest) for pack in image.layers[0].packs],
        }
    ]
    assert (document["matched"], document["unmatched"], document["unlikely"]) == (4, {}, 0)
    assert document["before"].keys() == document["after"].keys() == {"frames", "reads", "bytes"}
    plan = parse_plan(out.read_bytes(), "x")
    assert document["plan"] == {"digest": str(plan.digest), "ranges": 4}
    saved = Shelf(str(shell.root)).load("fast")
    assert saved.parts == plan.parts
    assert (saved.name, plan.name) == ("fast", "start")
    assert all(is_raw(shell.site.store, pack) for pack in image.layers[0].packs)
    # By the name on the shelf, what is laid out like that already stays.
    again = shell.json("optimize", "hot", "--plan", "fast")
    assert (again["manifest"], again["bytes_stored"], again["tag"]) == (document["manifest"], 0, None)


def test_optimize_leaves_what_is_unlikely(shell: Shell) -> None:
    document = shell.json("optimize", "it", "--plan", str(shell.file), "--min-chance", "0.9998")
    assert (document["matched"], document["unlikely"], document["plan"]["ranges"]) == (3, 1, 4)
    line = shell("optimize", "it", "--plan", str(shell.file), "--min-chance", "0.9998").splitlines()[0]
    assert ": 3 of 3 planned ranges, 1 too unlikely, " in line


def test_convert_by_a_plan(shell: Shell, tmp_path: Path) -> None:
    shell.file.rename(tmp_path / "moved.json")
    plan = str(tmp_path / "moved.json")
    out = tmp_path / "new.json"
    arguments = ("convert", shell.source, "--role", "base", "--no-dedup", "--plan", plan)
    document = shell.json(*arguments, "--tag", "hot", "--plan-out", str(out), "--save-plan", "fast")
    assert document["hot"] == {
        "bytes": 65_536,
        "chunks": 4,
        "frames": 1,
        "bytes_copied": 0,
        "matched": 4,
        "unmatched": {},
    }
    new = parse_plan(out.read_bytes(), "x")
    assert document["plan"] == {"digest": str(new.digest), "ranges": 4, "remapped": ANY}
    assert document["plan"]["remapped"]["rate"] == 1
    assert [each.offset for each in new.parts[0].ranges] == [0, 16_384, 32_768, 49_152]
    assert Shelf(str(shell.root)).load("fast").parts == new.parts
    same(shell.site, "it", "hot")
    text = shell(*arguments, "--tag", "hot-2")
    assert "  4 of 4 planned ranges come first: 65.5 kB in 1 frames\n" in text
    text = shell(*arguments[:4], "--plan", plan, "--min-chance", "0.9998")
    assert "  3 of 3 planned ranges come first: 49.2 kB in 1 frames\n" in text


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("optimize", "it"), ExitCode.USAGE, "--plan"),
        (("optimize", "it", "--plan", "nothing"), ExitCode.NOT_FOUND, "nothing"),
        (("optimize", "it", "--plan", "./nothing"), ExitCode.NOT_FOUND, "read plan ./nothing"),
        (("optimize", "it", "--plan", "@bad"), ExitCode.MALFORMED, "bad.json"),
        (("optimize", "none", "--plan", "@plan"), ExitCode.NOT_FOUND, "none"),
        (("optimize", "it", "--plan", "@plan", "--min-chance", "1.5"), ExitCode.USAGE, "--min-chance"),
        (("optimize", "it", "--plan", "@plan", "--plan-out", "/nowhere/x"), ExitCode.NOT_FOUND, "no directory"),
        (("optimize", "it", "--plan", "@plan", "--save-plan", "none"), ExitCode.USAGE, "can't be the name of a plan"),
        (("optimize", "it", "--plan", "@plan", "--store", "http://x"), ExitCode.USAGE, "can only be read"),
        (("convert", "@source", "--role", "base", "--save-plan", "x"), ExitCode.USAGE, "name it with --plan"),
        (("convert", "@source", "--role", "base", "--plan", "@bad"), ExitCode.MALFORMED, "bad.json"),
    ],
)
def test_what_is_wrong_is_one_line(shell: Shell, arguments: tuple[str, ...], code: ExitCode, text: str) -> None:
    (shell.site.path / "bad.json").write_bytes(b"{}\n")
    names = {"@plan": str(shell.file), "@bad": str(shell.site.path / "bad.json"), "@source": shell.source}
    before = shell.site.snapshot()
    line = shell(*(names.get(word, word) for word in arguments), code=code)
    assert text in line
    assert line.startswith("imgtool: ") and line.count("\n") == 1
    assert shell.site.snapshot()[1:] == before[1:]
