"""The command line of plans, and what other verbs make of plans in stores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.plans import part, part_of, plan
from support.tars import file, symlink, tar

from imgtool.cli import run
from imgtool.exitcodes import ExitCode
from layerstore.attachment import attachment_name
from layerstore.digest import Digest
from layerstore.image import Layer, load_image
from prefetch.plans.format import PLAN_MEDIA_TYPE, Plan, PlannedRange, parse_plan
from prefetch.plans.published import fetch, publish
from prefetch.plans.shelf import Shelf
from prefetch.trace.format import Access, Trace, TracedLayer, TraceHeader
from prefetch.trace.traces import Traces

KB = 1024
PARTS = [noise(300 * KB, number) for number in range(4)]
BASE = tar(*(file(f"lib/{number}", data) for number, data in enumerate(PARTS)), symlink("link", "lib/0"))
NEXT = tar(file("lib/0", PARTS[0]), file("lib/1", noise(290 * KB, 11)), file("lib/3", PARTS[3]))
WORK = tar(file("src/main", noise(100 * KB, 9)))


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs commands in this process; a node's root and a store with ``base``, ``work``, ``env`` of both, ``next``."""

    def __init__(self, path: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.site = Site(path)
        self.root = str(path / "root")
        self._capture = capture
        source, over = self.site.image([BASE]), self.site.image([BASE, WORK])
        self.ok("convert", source, "--role", "base", "--tag", "base")
        self.ok("convert", over, "--role", "workspace", "--base", "base", "--tag", "work")
        self.ok("compose", "--base", "base", "--workspace", "work", "--tag", "env")
        self.ok("convert", self.site.image([NEXT]), "--role", "base", "--tag", "next", "--no-dedup")

    def __call__(self, *arguments: str) -> Result:
        self._capture.readouterr()
        code = run(arguments)
        out, err = self._capture.readouterr()
        return Result(int(code), out, err)

    def ok(self, *arguments: str) -> Result:
        result = self(*arguments)
        assert result.code == 0, result.err
        assert result.err == ""
        return result

    def fails(self, code: ExitCode, *arguments: str) -> str:
        """One line on standard error, nothing on standard output; returns the line."""
        result = self(*arguments)
        assert (result.code, result.out) == (code, ""), result.err
        line = result.err[:-1]
        assert line.startswith("imgtool: ") and line.isprintable() and "internal" not in line, line
        return line

    def layers(self, name: str = "env") -> tuple[Layer, ...]:
        return load_image(self.site.store, name).layers

    def plan(self, name: str = "start", image: str = "env", **fields: Any) -> Plan:
        return plan(*(part_of(layer) for layer in self.layers(image)), name=name, image=image, **fields)

    def trace(self, name: str, *numbers: int, image: str = "base", ended: int = 500_000) -> Trace:
        """A run that reads the first blocks of these frames of the image's first pack, 20 ms after each other."""
        layers = tuple(
            TracedLayer(layer.metadata, tuple(pack.digest for pack in layer.packs)) for layer in self.layers(image)
        )
        accesses = tuple(
            Access(20_000 * at, 0, 1, 262_144 * number, 8192, path=f"lib/{number}", file_offset=0)
            for at, number in enumerate(numbers)
        )
        trace = Trace(TraceHeader(layers, image, command=("python3", name)), accesses, ended=ended + len(name))
        Traces(self.root).save(name, trace)
        return trace


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("IMGTOOL_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("IMGTOOL_STORE", str(tmp_path / "store"))
    with fsync_for_free():
        yield Shell(tmp_path, capsys)


@pytest.fixture
def runs(shell: Shell) -> Shell:
    """With three runs that read nearly the same."""
    shell.trace("one", 0, 1, 2)
    shell.trace("two", 0, 1, 2, 3)
    shell.trace("three", 0, 1, 2)
    return shell


# -- the shelf --------------------------------------------------------------------------------------------------------


def test_a_node_without_plans(shell: Shell) -> None:
    assert shell.ok("plan", "ls", "--json").json == []
    assert shell.ok("plan", "ls").out.split()[:5] == ["NAME", "IMAGE", "LAYERS", "RANGES", "BYTES"]
    for arguments in (["show", "none-such"], ["rm", "none-such"], ["publish", "none-such"], ["export", "none-such"]):
        assert "no plan 'none-such'" in shell.fails(ExitCode.NOT_FOUND, "plan", *arguments)


def test_import_ls_export_and_rm(shell: Shell, tmp_path: Path) -> None:
    it = shell.plan(gap=0.912)
    given = tmp_path / "given.json"
    given.write_bytes(it.to_bytes())
    document = shell.ok("plan", "import", str(given), "--json").json
    assert document == {"name": "start", "path": f"{shell.root}/plans/start.json", "plan": str(it.digest)}
    assert shell.ok("plan", "import", str(given), "--name", "again").out.startswith("again: 2 layer(s), sha256:")
    listed = shell.ok("plan", "ls", "--json").json
    assert [item["name"] for item in listed] == ["again", "start"]
    assert listed[1] == {
        "name": "start",
        "plan": str(it.digest),
        "image": "env",
        "manifest": it.manifest,
        "layers": [str(each.metadata) for each in it.parts],
        "ranges": 4,
        "bytes": 4 * 4096,
        "learner": "union",
        "runs": 3,
        "gap_closed": 0.912,
        "error": None,
    }
    row = shell.ok("plan", "ls").out.splitlines()[2].split()
    assert row == ["start", "env", "2", "4", "16.4", "kB", "union", "3", "91.2%"]
    assert parse_plan(shell.ok("plan", "export", "start").out.encode(), "it") == it
    target = tmp_path / "out.json"
    assert shell.ok("plan", "export", "start", "-o", str(target)).out == ""
    assert target.read_bytes() == it.to_bytes()
    document = shell.ok("plan", "export", str(target), "-o", str(target), "--json").json
    assert document["plan"] == str(it.digest) and document["bytes_file"] == len(it.to_bytes())
    assert "--output" in shell.fails(ExitCode.USAGE, "plan", "export", "start", "--json")
    shell.fails(ExitCode.NOT_FOUND, "plan", "rm", "start", "wrong")
    assert shell.ok("plan", "rm", "start", "again").out == "removed start\nremoved again\n"
    assert shell.ok("plan", "ls", "--json").json == []


def test_damaged_plans_are_listed_with_the_reason(shell: Shell) -> None:
    shelf = Shelf(shell.root)
    path = shelf.save(shell.plan())
    Path(path).write_bytes(b"{")
    [item] = shell.ok("plan", "ls", "--json").json
    assert item["name"] == "start" and "not JSON" in item["error"]
    assert "not JSON" in shell.ok("plan", "ls").out
    assert "not JSON" in shell.fails(ExitCode.MALFORMED, "plan", "show", "start")
    assert shell.ok("plan", "rm", "start", "--json").json == [{"name": "start"}]


@pytest.mark.parametrize("name", ["auto", "none", "a/b", "", "x" * 300])
def test_names_that_no_plan_may_have(shell: Shell, tmp_path: Path, name: str) -> None:
    given = tmp_path / "given.json"
    given.write_bytes(shell.plan().to_bytes())
    shell.fails(ExitCode.USAGE, "plan", "import", str(given), "--name", name)


# -- looking ----------------------------------------------------------------------------------------------------------


def test_show(shell: Shell) -> None:
    Shelf(shell.root).save(shell.plan(gap=0.5, score={"recall": 0.75, "cold_requests": 20, "requests": 4}))
    lines = shell.ok("plan", "show", "start").out.splitlines()
    assert lines[0].split()[:3] == ["LAYER", "RANGES", "BYTES"]
    assert lines[1].split()[:4] == ["0", shell.layers()[0].metadata.hex[:12], "2", "8.19"]
    assert any(line.startswith("     learned  by union from 3 run(s)") for line in lines)
    assert any(line.split() == ["lost", "intersection"] for line in lines)
    assert "  gap closed  50.0%" in lines and "      recall  75.0%" in lines
    assert "    requests  20.0 without, 4.0 with the plan" in lines
    assert "FETCHED" in lines[0], "the image is in the store, so sizes are known"
    document = shell.ok("plan", "show", "start", "--json").json
    assert list(document) == ["name", "plan", "image", "manifest", "layers", "guessed", "learned", "score"]
    assert document["guessed"] is False and document["score"]["gap_closed"] == 0.5
    assert [list(layer) for layer in document["layers"]] == [
        ["layer", "ranges", "bytes", "bytes_sure", "frames", "bytes_fetched", "first_due", "last_due"]
    ] * 2
    assert document["layers"][0]["last_due"] == 1000 and document["layers"][0]["frames"] == 1


def test_show_lists_ranges_in_the_order_in_which_they_are_due(shell: Shell) -> None:
    Shelf(shell.root).save(shell.plan())
    lines = shell.ok("plan", "show", "start", "--ranges", "0").out.splitlines()
    rows = [line.split() for line in lines[-4:]]
    assert [row[:3] for row in rows] == [
        ["0.0", "0", "usr/bin/python3"],
        ["0.0", "1", "usr/bin/python3"],
        ["1.0", "0", "usr/bin/python3"],
        ["1.0", "1", "usr/bin/python3"],
    ]
    ranges = shell.ok("plan", "show", "start", "--ranges", "1", "--json").json["ranges"]
    assert ranges == [
        {
            "layer": 0, "device": 1, "offset": 0, "length": 4096, "due": 0, "chance": 1.0, "path": "usr/bin/python3",
            "file_offset": 0,
        }
    ]  # fmt: skip


def test_show_of_a_plan_whose_image_is_not_here_guesses(shell: Shell, tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    given.write_bytes(plan(part(1), part(2), image="elsewhere").to_bytes())
    assert "ABOUT" in shell.ok("plan", "show", str(given)).out.splitlines()[0]
    assert shell.ok("plan", "show", str(given), "--json").json["guessed"] is True
    shell.fails(ExitCode.NOT_FOUND, "plan", "show", str(given), "--image", "nothing")


def test_hostile_texts_of_a_plan_stay_printable(shell: Shell, tmp_path: Path) -> None:
    bad = "a\x1b[31m\n"
    one = replace(part(1), ranges=(PlannedRange(1, 0, 4096, 0, 1, bad, 0),))
    learned = {"learner": bad, "runs": bad, "note": bad, "tried": [bad, {"learner": bad, "gap_closed": 10**350}]}
    names = ("gap_closed", "worst_gap_closed", "bytes", "runs", "cold_seconds", "seconds", "warm_seconds", "requests")
    it = Plan((one,), bad, bad, bad, {**learned, "remapped": {"rate": bad}}, dict.fromkeys(names, 10**350))
    given = tmp_path / "given.json"
    given.write_bytes(it.to_bytes())
    for arguments in (["show", str(given), "--ranges", "0"], ["diff", str(given), str(given)]):
        text = shell.ok("plan", *arguments).out
        assert "\x1b" not in text and all(line.isprintable() for line in text.splitlines())
    assert shell.ok("plan", "import", str(given), "--name", "odd").out.isascii()
    text = shell.ok("plan", "ls").out
    assert "\x1b" not in text and len(text.splitlines()) == 2
    assert [each.name for each in Shelf(shell.root).find([one.metadata])] == ["odd"]


def test_show_draws(shell: Shell, tmp_path: Path) -> None:
    Shelf(shell.root).save(shell.plan())
    picture = tmp_path / "plan.svg"
    shell.ok("plan", "show", "start", "--picture", str(picture))
    assert b"<svg" in picture.read_bytes()
    shell.fails(ExitCode.USAGE, "plan", "show", "start", "--picture", str(tmp_path / "plan.doc"))


def test_diff(shell: Shell) -> None:
    shelf = Shelf(shell.root)
    old = shell.plan("old")
    shelf.save(old)
    shelf.save(replace(old, name="same"))
    shelf.save(plan(part_of(shell.layers()[0], 1), name="new"))
    assert shell.ok("plan", "diff", "old", "same", "--json").json["same"] is True
    document = shell.ok("plan", "diff", "old", "new", "--json").json
    assert list(document) == ["same", "layers", "frames", "files_only_a", "files_only_b"]
    assert document["layers"][0] == {
        "layer": str(old.parts[0].metadata), "bytes_both": 4096, "bytes_only_a": 4096, "bytes_only_b": 0,
    }  # fmt: skip
    assert document["frames"] == {"both": 1, "only_a": 1, "only_b": 0, "moved": 0}
    assert "frames: 1 in both, 1 only in A, 0 only in B" in shell.ok("plan", "diff", "old", "new").out


# -- learning ---------------------------------------------------------------------------------------------------------


def test_train_scores_what_it_learns_and_writes_down_what_lost(runs: Shell) -> None:
    document = runs.ok("plan", "train", "it", "--from", "one", "two", "three", "--json").json
    assert list(document) == [
        "name", "path", "plan", "published", "layers", "ranges", "bytes", "remapped", "learned", "score",
    ]  # fmt: skip
    it = Shelf(runs.root).load("it")
    assert document["plan"] == str(it.digest) and document["published"] is None
    assert it.learned["runs"] == 3 and len(document["learned"]["tried"]) > 5
    assert document["score"]["gap_closed"] > 0 and document["score"]["runs"] == 3
    assert {planned.offset // 262_144 for planned in it.parts[0].ranges} >= {0, 1, 2}
    text = runs.ok("plan", "train", "it", "--from", "three", "--from", "one", "two").out
    assert text.startswith("it: ") and "learned from 3 run(s)" in text and "gap closed" in text and "lost" in text
    assert Shelf(runs.root).load("it") == it, "the order of traces doesn't matter"


def test_train_on_a_single_run_has_no_score(runs: Shell) -> None:
    path = Traces(runs.root).path("one")
    text = runs.ok("plan", "train", "alone", "--from", path).out
    assert "none is left to score the plan on" in text
    assert Shelf(runs.root).load("alone").score == {}


def test_train_takes_options(runs: Shell) -> None:
    arguments = ["plan", "train", "it", "--from", "one", "two", "three", "--json", "--image", "env"]
    budget = runs.ok(*arguments, "--budget", "300K", "--latency", "5ms", "--bandwidth", "10M").json
    assert budget["learned"]["budget"] == 300 * KB
    assert budget["learned"]["link"]["latency"] == 0.005 and budget["learned"]["link"]["bandwidth"] == 10 << 20
    assert runs.ok(*arguments, "--learner", "union").json["learned"]["learner"] == "union"
    assert runs.ok(*arguments, "--holdout", "2").json["learned"]["holdout"] == 2
    for wrong in (
        ["--learner", "oracle"],
        ["--holdout", "3"],
        ["--holdout", "0"],
        ["--latency", "fast"],
        ["--budget", "-1"],
    ):
        runs.fails(ExitCode.USAGE, *arguments, *wrong)
    runs.fails(ExitCode.USAGE, "plan", "train", "it")
    runs.fails(ExitCode.USAGE, "plan", "train", "none", "--from", "one")
    runs.fails(ExitCode.NOT_FOUND, "plan", "train", "it", "--from", "one", "four")


def test_train_remaps_traces_of_another_build(runs: Shell) -> None:
    document = runs.ok("plan", "train", "it", "--from", "one", "two", "three", "--image", "next", "--json").json
    [layer] = runs.layers("next")
    assert document["layers"] == [str(layer.metadata)]
    assert [each["trace"] for each in document["remapped"]] == ["one", "two", "three"]
    assert all(0 < each["rate"] <= 1 for each in document["remapped"])
    text = runs.ok("plan", "train", "it", "--from", "one", "two", "--image", "next").out
    assert "one is re-mapped: " in text


def test_train_publishes(runs: Shell) -> None:
    document = runs.ok("plan", "train", "it", "--from", "one", "two", "three", "--publish", "--json").json
    assert document["published"] == runs.site.store.location
    found = fetch(runs.site.store, runs.layers()[0].metadata)
    assert found == Shelf(runs.root).load("it")


def test_score(runs: Shell) -> None:
    runs.ok("plan", "train", "it", "--from", "one", "two", "three")
    runs.trace("four", 0, 1, 3)
    document = runs.ok("plan", "score", "it", "--from", "four", "--json").json
    assert list(document) == ["name", "plan", "holdout", "remapped", "score"]
    assert document["score"]["runs"] == 1 and 0 < document["score"]["recall"] <= 1
    faster = runs.ok("plan", "score", "it", "--from", "four", "--latency", "0ms", "--json").json["score"]
    assert faster["cold_seconds"] < document["score"]["cold_seconds"]
    slower = runs.ok("plan", "score", "it", "--from", "four", "--bandwidth", "1M", "--json").json["score"]
    assert slower["cold_seconds"] > document["score"]["cold_seconds"]
    text = runs.ok("plan", "score", "it", "--from", "four", "--image", "env").out
    assert text.startswith("it: 1 run(s)\n") and "recall" in text and "wasted" in text
    crossed = runs.ok("plan", "score", "it", "--from", "one", "two", "three", "--holdout", "1", "--json").json
    assert crossed["score"]["runs"] == 3 and crossed["holdout"] == 1
    runs.fails(ExitCode.USAGE, "plan", "score", "it", "--from", "one", "--holdout", "1")


def test_remap(runs: Shell) -> None:
    shelf = Shelf(runs.root)
    runs.ok("plan", "train", "it", "--from", "one", "two", "three")
    document = runs.ok("plan", "remap", "it", "--to", "next", "--json").json
    assert document["name"] == "it-next" and 0 < document["match"]["rate"] <= 1
    made = shelf.load("it-next")
    assert [each.metadata for each in made.parts] == [runs.layers("next")[0].metadata]
    assert (made.image, made.manifest) == ("next", str(runs.site.store.resolve("next").digest))
    assert made.score == {} and made.learned["remapped"]
    text = runs.ok("plan", "remap", "it", "--to", "next", "--from-image", "base", "--name", "other").out
    assert text.startswith("other: ") and "% of " in text
    assert "re-mapped" in runs.ok("plan", "show", "other").out
    shelf.save(plan(part(1), name="strange"))
    runs.ok("convert", runs.site.tar(file("nothing", b"")), "--role", "toolkit", "--tag", "empty")
    assert "another image" in runs.fails(ExitCode.CONFLICT, "plan", "remap", "strange", "--to", "empty")
    runs.fails(ExitCode.NOT_FOUND, "plan", "remap", "it", "--to", "nothing")


# -- stores -----------------------------------------------------------------------------------------------------------


def test_publish_and_fetch(shell: Shell, tmp_path: Path) -> None:
    shelf = Shelf(shell.root)
    it = shell.plan(gap=0.9)
    shelf.save(it)
    assert "no plan" in shell.fails(ExitCode.NOT_FOUND, "plan", "fetch", "env")
    document = shell.ok("plan", "publish", "start", "--json").json
    assert (document["name"], document["plan"]) == ("start", str(it.digest))
    assert [each["tag"] for each in document["layers"]] == [attachment_name(each.metadata) for each in it.parts]
    assert shell.ok("plan", "publish", "start").out.startswith("start is the plan of 2 layer(s) in ")
    shelf.remove("start")
    assert shell.ok("plan", "fetch", "env").out.count("start: 2 ranges") == 2
    assert [each.name for each in shelf.find([each.metadata for each in it.parts])] == ["start", "start"]
    assert shelf.names() == []
    document = shell.ok("plan", "fetch", "env", "--name", "start", "--json").json
    assert (document["name"], len(document["layers"]), document["missing"], document["damaged"]) == ("start", 2, [], [])
    assert shelf.load("start") == it
    stranger = tmp_path / "stranger.json"
    stranger.write_bytes(plan(part(1)).to_bytes())
    assert "no image in" in shell.fails(ExitCode.NOT_FOUND, "plan", "publish", str(stranger))


def test_fetch_says_what_is_missing_and_what_is_damaged(shell: Shell) -> None:
    it = shell.plan()
    publish(shell.site.store, replace(it, parts=it.parts[:1]))
    base, work = (layer.metadata for layer in shell.layers())
    assert shell.ok("plan", "fetch", "env", "--json").json["missing"] == [str(work)]
    assert Shelf(shell.root).asked(work), "it is remembered that there is none"
    assert f"{work.hex[:12]}  no plan" in shell.ok("plan", "fetch", "env").out
    shell.site.flip(Digest.of(replace(it, parts=it.parts[:1]).to_bytes()))
    result = shell("plan", "fetch", "env")
    assert (result.code, result.out) == (ExitCode.CORRUPT, "") and str(base) in result.err.splitlines()[0]
    publish(shell.site.store, replace(it, parts=it.parts[1:]))
    result = shell("plan", "fetch", "env", "--json")
    assert result.code == 0 and len(result.json["damaged"]) == 1 and "left out" in result.err


def test_ls_shows_which_images_have_plans(shell: Shell) -> None:
    assert "PLANS" not in shell.ok("ls").out
    it = shell.plan()
    publish(shell.site.store, replace(it, parts=it.parts[:1]))
    base = shell.layers()[0].metadata
    lines = shell.ok("ls").out.splitlines()
    assert lines[0].split() == ["NAME", "ROLES", "SIZE", "ITS", "OWN", "PLANS", "MANIFEST"]
    assert [line.split()[0] for line in lines[1:]] == ["base", "env", "next", "work"]
    assert "1 of 1" in lines[1] and "1 of 2" in lines[2] and " of " not in lines[3] + lines[4]
    listed = {item["name"]: item["plans"] for item in shell.ok("ls", "--json").json}
    assert listed == {"base": [str(base)], "env": [str(base)], "next": [], "work": []}
    assert "plan start" in shell.ok("ls", "--all").out.splitlines()[-1]
    artifact = shell.ok("ls", "--all", "--json").json[-1]
    assert list(artifact) == ["name", "manifest", "type", "layer", "bytes", "annotations"]
    assert (artifact["name"], artifact["type"]) == (attachment_name(base), PLAN_MEDIA_TYPE)
    assert artifact["layer"] == str(base)


def test_inspect_says_whether_layers_have_plans(shell: Shell) -> None:
    it = shell.plan()
    publish(shell.site.store, replace(it, parts=it.parts[:1]))
    first, second = shell.ok("inspect", "env", "--json").json["layers"]
    size = len(replace(it, parts=it.parts[:1]).to_bytes())
    assert first["plan"] == {
        "name": "start", "plan": str(replace(it, parts=it.parts[:1]).digest), "runs": 3, "bytes": size, "error": None,
    }  # fmt: skip
    assert second["plan"] is None
    rows = [line.split() for line in shell.ok("inspect", "env").out.splitlines()]
    assert sum(row[:1] == ["plan"] for row in rows) == 1
    assert any(row[:5] == ["plan", "start,", "of", "3", "run(s)"] for row in rows)
    shell.site.flip(shell.site.store.resolve(attachment_name(it.parts[0].metadata)).digest)
    damaged = shell.ok("inspect", "env", "--json").json["layers"][0]["plan"]
    assert damaged["name"] is None and "expected sha256:" in damaged["error"]


def test_commands_for_images_say_that_a_plan_is_none(shell: Shell) -> None:
    it = shell.plan()
    publish(shell.site.store, it)
    name = attachment_name(it.parts[0].metadata)
    for arguments in (
        ["tag", name, "other"], ["inspect", name], ["tree", name], ["cat", name, "/x"], ["dump", name],
        ["diff", name, "env"], ["compose", "--base", name], ["raw", name], ["plan", "fetch", name],
    ):  # fmt: skip
        line = shell.fails(ExitCode.UNSUPPORTED, *arguments)
        assert f"'{name}': an artifact of type '{PLAN_MEDIA_TYPE}' for layer {it.parts[0].metadata}" in line
        assert "not an image" in line


@pytest.mark.case("P03")
def test_copy_takes_plans_along(shell: Shell, tmp_path: Path) -> None:
    it = shell.plan()
    publish(shell.site.store, it)
    store, other = str(shell.site.path / "store"), str(tmp_path / "other")
    document = shell.ok("copy", "env", store, other, "--no-plans", "--json").json
    assert list(document)[-4:] == ["plans_copied", "plans_present", "plans_kept", "plans_failed"]
    assert document["plans_copied"] == 0
    assert [item["plans"] for item in shell.ok("ls", "--store", other, "--json").json] == [[]]
    text = shell.ok("copy", "env", store, other).out
    assert text.splitlines()[1] == "  2 plan(s) came along"
    document = shell.ok("copy", "env", store, other, "--json").json
    assert [document[f"plans_{what}"] for what in ("copied", "present", "kept", "failed")] == [0, 2, 0, 0]
    shell.ok("plan", "fetch", "env", "--store", other, "--name", "start")
    assert Shelf(shell.root).load("start") == it
    publish(shell.site.store, replace(it, name="better"))
    assert "2 layer(s) keep the plan that they have there" in shell.ok("copy", "env", store, other).out
    assert shell.ok("copy", "env", store, other, "--replace", "--json").json["plans_copied"] == 2
    assert shell("verify", "--store", other).code == 0


def test_copy_warns_of_a_damaged_plan_and_copies_the_image(shell: Shell, tmp_path: Path) -> None:
    it = shell.plan()
    publish(shell.site.store, it)
    shell.site.flip(Digest.of(replace(it, parts=it.parts[:1]).to_bytes()))
    store, other = str(shell.site.path / "store"), str(tmp_path / "other")
    result = shell("copy", "env", store, other, "--json")
    assert result.code == 0 and result.json["plans_failed"] == 1 and result.json["plans_copied"] == 1
    assert result.err.startswith("imgtool: warning: a plan was left behind: ")


def test_verify_reads_plans(shell: Shell) -> None:
    it = shell.plan()
    publish(shell.site.store, it)
    assert shell.ok("verify").out == "everything is as it should be\n"
    os.truncate(shell.site.blob_path(Digest.of(replace(it, parts=it.parts[:1]).to_bytes())), 5)
    result = shell("verify", "--json")
    assert result.code == ExitCode.FINDINGS
    assert {finding["tag"] for finding in result.json} == {None, attachment_name(it.parts[0].metadata)}


def test_rm_leaves_plans_and_gc_drops_those_of_layers_that_are_gone(shell: Shell) -> None:
    it = shell.plan()
    publish(shell.site.store, it)
    base, work = (attachment_name(each.metadata) for each in it.parts)
    shell.ok("rm", "env", "work")
    assert {item["name"] for item in shell.ok("ls", "--all", "--json").json} == {"base", "next", base, work}
    dry = shell.ok("gc", "--dry-run", "--grace", "0", "--json").json
    assert (dry["plans_dropped"], dry["references"]) == ([work], 3)
    text = shell.ok("gc", "--dry-run", "--grace", "0").out
    assert "would delete the plan(s) of 1 layer(s) that no image has any more" in text
    wet = shell.ok("gc", "--grace", "0", "--json").json
    assert wet["plans_dropped"] == [work] and wet["deleted_blobs"] == dry["deleted_blobs"]
    assert {item["name"] for item in shell.ok("ls", "--all", "--json").json} == {"base", "next", base}
    shell.ok("rm", base)
    assert shell.ok("ls", "--json").json[0]["plans"] == []
    assert shell("verify").code == 0
