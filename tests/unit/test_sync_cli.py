"""``imgtool sync``: its text, its JSON and its exit codes; and mirrors on the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.faults import fsync_for_free
from support.httpstore import StoreServer
from support.mirrors import family, layer_of, publish_plan
from support.stores import Sample, assert_sound, image, publish

from imgtool.cli import run
from imgtool.exitcodes import ExitCode
from layerstore.attachment import attachment_name
from layerstore.store.directory import DirectoryStore

FAMILY = family(6, base_bytes=20_000, own_bytes=1_000)
TABLE = "image,tasks,eligible\n" + "".join(f"team/repo00{number},{number + 1},\n" for number in range(6))


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shop:
    """A store with a family, one of whose layers has a plan."""

    def __init__(self, path: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.source = str(path / "source")
        self.target = str(path / "target")
        self.store = DirectoryStore.create(self.source)
        for name, sample in FAMILY.items():
            publish(self.store, name, sample)
        packs = sorted(FAMILY["team/repo000"].blobs.values(), key=len)
        self.layer = layer_of(packs[-1], next(each for each in packs if len(each) == 1_000)).metadata
        self.plan = publish_plan(self.store, self.layer)
        self._capture = capture

    def __call__(self, *arguments: str) -> Result:
        self._capture.readouterr()
        code = run(["sync", *arguments])
        return Result(int(code), *self._capture.readouterr())

    def table(self, text: str = TABLE) -> str:
        path = self.path / "usage.csv"
        path.write_text(text)
        return str(path)

    @property
    def there(self) -> DirectoryStore:
        return DirectoryStore(self.target)


@pytest.fixture
def shop(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("IMGTOOL_ROOT", str(tmp_path / "root"))
    with fsync_for_free():
        yield Shop(tmp_path, capsys)


def distinct(*samples: Sample) -> int:
    return sum({digest: len(data) for each in samples for digest, data in each.blobs.items()}.values())


def test_all_images_are_copied_with_their_plans(shop: Shop) -> None:
    result = shop(shop.source, shop.target, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.json == {
        "dry_run": False,
        "images": [
            {
                "tag": name,
                "manifest": str(sample.target.digest),
                "state": "copied",
                "blobs": 5 if name == "team/repo000" else 3,
                "bytes": result.json["images"][number]["bytes"],
                "error": None,
            }
            for number, (name, sample) in enumerate(FAMILY.items())
        ],
        "plans": [
            {
                "tag": attachment_name(shop.layer),
                "manifest": str(shop.plan.target.digest),
                "state": "copied",
                "blobs": 3,
                "bytes": distinct(shop.plan),
                "error": None,
            }
        ],
        "blobs": 23,
        "bytes": distinct(*FAMILY.values(), shop.plan),
        "selection": None,
    }
    assert sum(each["bytes"] for each in result.json["images"]) == distinct(*FAMILY.values())
    assert_sound(shop.there)
    again = shop(shop.source, shop.target)
    assert again.out == "0 image(s) copied, 0 blob(s), 0 B; 6 were there already\n"


def test_a_dry_run_says_what_is_missing_and_makes_nothing(shop: Shop) -> None:
    result = shop(shop.source, shop.target, "--select", "team/repo00[01]", "--exclude", "*1", "--dry-run")
    assert result.code == 0
    assert result.out.splitlines()[1].split() == ["team/repo000", "new", "5", "23.2", "kB"]
    assert result.out.splitlines()[-1].startswith("1 image(s) to copy, 8 blob(s), 2")
    assert not Path(shop.target).exists()
    shop(shop.source, shop.target, "--select", "team/repo001")
    document = shop(shop.source, shop.target, "--dry-run", "--json").json
    assert [each["state"] for each in document["images"]] == ["new", "present", "new", "new", "new", "new"]
    assert document["images"][0]["blobs"] == 3
    assert list(shop.there.names()) == ["team/repo001"]


def test_after_a_failure_it_goes_on_and_the_exit_code_says_so(shop: Shop) -> None:
    victim = next(digest for digest, data in FAMILY["team/repo002"].blobs.items() if len(data) == 1_000)
    Path(shop.source, "blobs", "sha256", victim.hex).write_bytes(b"x" * 1_000)
    publish(DirectoryStore.create(shop.target), "team/repo004", image(b"other"))
    for dry, code in (("--dry-run", ExitCode.CONFLICT), ("--json", ExitCode.CORRUPT)):
        result = shop(shop.source, shop.target, dry)
        assert result.code == code
        assert result.err.count("\n") == (1 if dry == "--dry-run" else 0)
    states = {each["tag"]: each["state"] for each in result.json["images"]}
    assert states == {name: "failed" if name in ("team/repo002", "team/repo004") else "copied" for name in FAMILY}
    errors = [each["error"] for each in result.json["images"] if each["error"]]
    assert victim.hex in errors[0] and "say to replace it" in errors[1]
    result = shop(shop.source, shop.target)
    assert result.code == ExitCode.CORRUPT
    assert "team/repo002 was not copied" in result.err
    assert result.out == "0 image(s) copied, 0 blob(s), 0 B; 4 were there already; 2 failed\n"
    assert shop(shop.source, shop.target, "--replace", "--exclude", "*2").code == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--select", "nobody"], ExitCode.NOT_FOUND),
        (["--select", "../x"], ExitCode.USAGE),
        (["--budget", "1G"], ExitCode.USAGE),
        (["--tasks", "x.csv"], ExitCode.USAGE),
        (["--curve", "x.svg"], ExitCode.USAGE),
        (["--budget", "1G", "--tasks", "x.csv", "--curve", "x.gif"], ExitCode.USAGE),
        (["--budget", "1G", "--tasks", "nowhere.csv"], ExitCode.NOT_FOUND),
        (["--budget", "many", "--tasks", "x.csv"], ExitCode.USAGE),
    ],
)
def test_wrong_requests_are_one_line_and_make_nothing(shop: Shop, arguments: list[str], code: ExitCode) -> None:
    result = shop(shop.source, shop.target, *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert not Path(shop.target).exists()


def test_a_target_that_can_only_be_read_is_refused(shop: Shop) -> None:
    result = shop(shop.source, "http://me:secret@127.0.0.1:1/store", "--select", "team/*")
    assert result.code == ExitCode.USAGE
    assert "secret" not in result.err


# A second site


def test_images_for_a_second_site(shop: Shop, tmp_path: Path) -> None:
    table = shop.table(TABLE.replace("repo005,6,", "repo005,6,no") + "gone,9,\n")
    budget = str(distinct(*(FAMILY[f"team/repo00{number}"] for number in (3, 4))) + 10)
    curve = str(tmp_path / "curve.svg")
    arguments = (shop.source, shop.target, "--budget", budget, "--tasks", table)
    result = shop(*arguments, "--json", "--curve", curve)
    assert result.code == ExitCode.NOT_FOUND  # of the one that the store lacks
    selection = result.json["selection"]
    assert sorted(selection.pop("chosen")) == ["team/repo003", "team/repo004"]
    curve_points = selection.pop("curve")
    tried = selection.pop("tried")
    assert selection == {
        "budget": int(budget),
        "tasks": 9,
        "share": 0.3,
        "images": 2,
        "bytes": int(budget) - 10,
        "bound": selection["bound"],
        "way": "per-new-byte",
        "tasks_total": 30,
        "candidates": 5,
        "ineligible": ["team/repo005"],
        "unreadable": ["gone"],
        "unused": 0,
    }
    assert 9 <= selection["bound"] <= 15
    assert [each["way"] for each in tried] == [
        "per-new-byte", "per-half-share", "per-share", "family-first", "largest-first", "single",
    ]  # fmt: skip
    assert [each["budget"] for each in curve_points] == sorted(each["budget"] for each in curve_points)
    assert curve_points[-1].keys() == {"budget", "tasks", "share", "images", "bytes"}
    assert curve_points[-1]["tasks"] == 15
    assert list(shop.there.names()) == ["team/repo003", "team/repo004"]
    assert Path(curve).read_text().startswith("<?xml")
    drawn = Path(curve).read_bytes()
    text = shop(*arguments, "--dry-run", "--curve", curve)
    assert Path(curve).read_bytes() == drawn
    assert text.out.startswith("2 of 5 image(s) cover 9 of 30 tasks (30.0 %) in 2")
    assert "1 image(s) are not eligible to leave: 6 tasks\n" in text.out
    assert sum(line.endswith("this one") for line in text.out.splitlines()) == 1
    assert text.err == "imgtool: warning: gone will not be copied: reference 'gone' is not in " + shop.source + "\n"


def test_a_table_that_is_wrong_names_its_line(shop: Shop) -> None:
    table = shop.table("image,tasks\nteam/repo001,many\n")
    result = shop(shop.source, shop.target, "--budget", "1G", "--tasks", table)
    assert result.code == ExitCode.MALFORMED
    assert "line 2: tasks are a number" in result.err
    result = shop(shop.source, shop.target, "--budget", "1G", "--tasks", shop.table("image,tasks\n"))
    assert result.code == ExitCode.NOT_FOUND


# Mirrors


def test_mirrors_stand_wherever_a_store_is_read(
    shop: Shop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerstore.store.retrying.FIRST_PAUSE", 0.001)
    half = DirectoryStore.create(str(shop.path / "half"))
    publish(half, "team/repo000", FAMILY["team/repo000"])
    damaged = next(digest for digest, data in FAMILY["team/repo000"].blobs.items() if len(data) == 20_000)
    with StoreServer(half.root, listing=True) as server:
        Path(half.root, "blobs", "sha256", damaged.hex).write_bytes(b"y" * 20_000)
        mirrors = f"{server.url}|file://{shop.source}"
        assert run(["copy", "team/repo001", mirrors, shop.target]) == 0
        assert run(["sync", mirrors, shop.target]) == 0
    assert sorted(shop.there.names()) == [attachment_name(shop.layer), *FAMILY]
    assert_sound(shop.there)
    gone = f"{server.url}|file://{shop.source}"  # nobody listens there any more
    capsys.readouterr()
    assert run(["copy", "team/repo001", gone, str(shop.path / "other")]) == 0
    assert "a plan was left behind" in capsys.readouterr().err  # the one that is gone might have had one
    assert run(["sync", gone, str(shop.path / "other"), "--select", "team/repo001", "--select", "team/repo000"]) == 0
    assert "a plan was left behind" in capsys.readouterr().err
    assert run(["sync", gone, str(shop.path / "other")]) == ExitCode.UNAVAILABLE
    capsys.readouterr()
    assert run(["copy", "absent", gone, str(shop.path / "other")]) == ExitCode.UNAVAILABLE
    assert server.url in capsys.readouterr().err
