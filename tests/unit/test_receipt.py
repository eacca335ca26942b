"""Receipts: round trips, hostile documents, the count of an upper, and the receipts that a node keeps."""

from __future__ import annotations

import copy
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import fsync_for_free
from support.receipts import RECEIPT

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, MalformedError, NotFoundError, UnsupportedError, UsageError
from layerstore.image import Layer, Role
from layerstore.version import FORMAT_VERSION, VERSION
from overlay.format import SandboxState, chain_of
from overlay.service import receipts as receipts_module
from overlay.service import written as written_module
from overlay.service.receipt import (
    MEANING,
    REASONS,
    Host,
    LayerRecord,
    PlanRecord,
    Read,
    Reason,
    Receipt,
    Verification,
    not_ours,
    rfc3339,
)
from overlay.service.receipts import KEPT_SECONDS, Receipts
from overlay.service.written import Written, written


def test_a_receipt_of_a_standing_and_of_an_ended_sandbox_round_trips() -> None:
    ended = RECEIPT.ending(
        Reason.TTL,
        read=Read(3, 786_432, 0.5, 4),
        wrote=Written(2, 8192, 1, 1),
        exit_code=7,
        prefetch={"brought": 180},
        at=1_796_032_801.25,
    )
    planned = replace(RECEIPT, plan=PlanRecord("auto", (("tests", "sha256:" + "e" * 64),), 4096, 4096), trace="monday")
    for receipt in (RECEIPT, ended, RECEIPT.ending("down"), replace(RECEIPT, ttl=None, carried={}), planned):
        assert Receipt.from_bytes(receipt.to_bytes()) == receipt
        assert Receipt.from_json(receipt.to_json()) == receipt
    document = json.loads(ended.to_bytes())
    assert document["end"] == {
        "ended": "2026-11-30T10:00:01.250Z",
        "reason": "ttl",
        "read": {"frames": 3, "bytes": 786_432, "waited": 0.5, "events": 4},
        "wrote": {"files": 2, "bytes": 8192, "directories": 1, "deleted": 1, "complete": True},
        "exit_code": 7,
        "prefetch": {"brought": 180},
    }
    assert planned.to_json()["trace"] == "monday"
    assert planned.to_json()["plan"] == {
        "name": "auto",
        "plans": [{"name": "tests", "digest": "sha256:" + "e" * 64}],
        "planned_bytes": 4096,
        "matched_bytes": 4096,
    }
    assert document["not_ours"] == ["resources.cpu", "network", "labels"]
    assert (document["imgtool"], document["format_version"]) == (VERSION, FORMAT_VERSION)
    assert document["verification"] == {"state": "verified", "meaning": MEANING[Verification.VERIFIED], "detail": ""}


def test_a_receipt_lives_in_the_state_of_its_sandbox() -> None:
    layers = ("a" * 64,)
    image: dict[str, object] = {"name": "debian"}
    state = SandboxState("box", 1, "b", "lazy", False, None, layers, chain_of(layers), image, RECEIPT.to_json())
    assert Receipt.from_json(SandboxState.from_bytes(state.to_bytes()).receipt) == RECEIPT


def test_the_layers_of_an_image_are_recorded_with_their_packs() -> None:
    metadata, blob = Digest.of(b"m"), Digest.of(b"b")
    assert LayerRecord.of(Layer(Role.TOOLKIT, metadata, 4096, blob, 100)) == LayerRecord("toolkit", str(metadata))


def test_every_word_is_explained_and_doubt_is_kept() -> None:
    assert set(MEANING) == set(Verification)
    assert set(REASONS) == set(Reason)
    doubted = RECEIPT.doubted("nobody answered from 10:00 to 10:01")
    document = doubted.ending(Reason.DOWN).to_json()
    assert document["verification"] == {
        "state": "suspect",
        "meaning": MEANING[Verification.SUSPECT],
        "detail": "nobody answered from 10:00 to 10:01",
    }


def test_this_host_is_known() -> None:
    host = Host.here()
    assert host is Host.here()
    assert host.kernel == os.uname().release
    assert len(host.boot) == 36
    assert host.zstd.count(".") == 2


def test_times_are_rfc_3339() -> None:
    assert rfc3339(0) == "1970-01-01T00:00:00.000Z"
    assert rfc3339(1_796_032_800.9996) == "2026-11-30T10:00:00.999Z"


def test_sections_that_are_partly_ours_are_named_field_by_field() -> None:
    carried = {"resources": {"cpu": 1, "gpu": {"count": 1}}, "network": {"mode": "none"}, "a.b": None}
    assert not_ours(carried) == ["resources.cpu", "resources.gpu", "network", "a.b"]


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("magic", "other", MalformedError),
        ("magic", None, MalformedError),
        ("version", 2, UnsupportedError),
        ("version", True, MalformedError),
        ("incompatible", ["x"], UnsupportedError),
        ("incompatible", "x", MalformedError),
        ("verification", {"state": "new", "detail": ""}, UnsupportedError),
        ("verification", {}, MalformedError),
        ("images", [3], MalformedError),
        ("layers", [{"role": "base", "layer": "x", "packs": [1]}], MalformedError),
        ("ttl", "1h", MalformedError),
        ("read_only", 1, MalformedError),
        ("end", [], MalformedError),
        ("end", {"ended": "x"}, MalformedError),
        ("overlay", [], MalformedError),
        ("plan", {"name": "x"}, MalformedError),
        ("trace", 3, MalformedError),
    ],
)
def test_a_document_that_is_no_receipt_is_refused(key: str, value: object, error: type[ImgtoolError]) -> None:
    with pytest.raises(error) as caught:
        Receipt.from_json({**RECEIPT.to_json(), key: value})
    assert str(caught.value).isprintable() and str(caught.value).startswith("receipt")


def test_a_receipt_of_a_release_that_knew_no_plans_is_read() -> None:
    document = {key: value for key, value in RECEIPT.ending("down").to_json().items() if key not in ("plan", "trace")}
    document["end"] = {key: value for key, value in document["end"].items() if key != "prefetch"}  # type: ignore[attr-defined]
    assert Receipt.from_json(document).plan is None


def test_fields_of_a_later_release_are_ignored() -> None:
    assert Receipt.from_json({**RECEIPT.to_json(), "moon": "full"}) == RECEIPT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(RECEIPT.to_json())), JSON)
def test_whatever_stands_in_a_field_only_our_errors_come(key: str, value: object) -> None:
    document: dict[str, Any] = {**copy.deepcopy(RECEIPT.to_json()), key: value}
    try:
        receipt = Receipt.from_json(document)
    except ImgtoolError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert Receipt.from_json(receipt.to_json()) == receipt


@given(st.binary(max_size=200))
def test_bytes_that_are_no_receipt_are_refused(data: bytes) -> None:
    with pytest.raises(ImgtoolError):
        Receipt.from_bytes(data)


def test_a_copy_is_written_durably_where_it_is_wanted(tmp_path: Path) -> None:
    with fsync_for_free():
        path = RECEIPT.write(str(tmp_path))
        ended = RECEIPT.ending(Reason.DOWN)
        assert ended.write(str(tmp_path)) == path == str(tmp_path / "box.json")
    assert os.listdir(tmp_path) == ["box.json"]
    assert Receipt.from_bytes(Path(path).read_bytes()) == ended
    with pytest.raises(NotFoundError, match="receipt of sandbox box"):
        RECEIPT.write(str(tmp_path / "nowhere"))


# -- receipts that a node keeps ---------------------------------------------------------------------------------------


def test_receipts_are_kept_by_id_and_the_newest_counts(tmp_path: Path) -> None:
    kept = Receipts(str(tmp_path))
    with pytest.raises(NotFoundError, match="kept for 7 days"):
        kept.get("box")
    for receipt in (RECEIPT.ending("ttl"), RECEIPT.ending("down")):
        kept.keep(receipt)
        assert Receipts(str(tmp_path)).get("box") == receipt
    assert os.listdir(tmp_path / "receipts") == ["box.json"]
    for name in ("../box", "", "BOX", "a/b"):
        with pytest.raises(UsageError):
            kept.get(name)
    with pytest.raises(UsageError):
        kept.keep(replace(RECEIPT, id="../x"))


def test_a_torn_receipt_is_none(tmp_path: Path) -> None:
    kept = Receipts(str(tmp_path))
    kept.keep(RECEIPT)
    path = tmp_path / "receipts" / "box.json"
    for content in (b"", path.read_bytes()[:100]):
        path.write_bytes(content)
        with pytest.raises(NotFoundError):
            kept.get("box")


def test_old_receipts_and_those_beyond_the_bound_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "KEPT", 5)
    monkeypatch.setattr(receipts_module, "_PRUNE_EVERY", 3)
    kept = Receipts(str(tmp_path))
    directory = tmp_path / "receipts"
    first = int(time.time()) - 1000
    for number in range(12):
        kept.keep(replace(RECEIPT, id=f"box-{number:02}"))
        os.utime(directory / f"box-{number:02}.json", (first + number, first + number))
    assert len(os.listdir(directory)) <= 5 + 3 + 1, "it looks from time to time by itself"
    kept.prune(now=first + 12)
    assert sorted(os.listdir(directory))[-4:] == [f"box-{number:02}.json" for number in range(8, 12)]
    assert len(os.listdir(directory)) == 5
    for name, at in ((".tmp-1-dead", first), (".tmp-1-live", first + KEPT_SECONDS)):
        (directory / name).write_bytes(b"")
        os.utime(directory / name, (at, at))
    kept.prune(now=first + 10 + KEPT_SECONDS)
    assert sorted(os.listdir(directory)) == [".tmp-1-live", "box-10.json", "box-11.json"]


def test_a_receipt_that_cannot_be_kept_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "receipts").write_bytes(b"in the way")
    with pytest.raises(ImgtoolError, match="keep the receipt of sandbox box"):
        Receipts(str(tmp_path)).keep(RECEIPT)
    assert os.listdir(tmp_path) == ["receipts"]


# -- what a sandbox has written ---------------------------------------------------------------------------------------


def test_an_upper_is_counted_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "big").write_bytes(b"x" * 100_000)
    upper = tmp_path / "upper"
    (upper / "a" / "b").mkdir(parents=True)
    (upper / "a" / "file").write_bytes(b"x" * 10_000)
    os.link(upper / "a" / "file", upper / "a" / "b" / "same")
    with open(upper / "sparse", "wb") as sparse:
        sparse.truncate(1 << 40)
    os.symlink(outside, upper / "link")
    os.symlink("link", upper / "a" / "loop")
    os.mkfifo(upper / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(upper / "socket"))
    (upper / os.fsdecode(b"\xff\n")).touch()
    count = written(str(upper))
    assert (count.files, count.directories, count.deleted, count.complete) == (8, 2, 0, True)
    assert 10_000 <= count.bytes < 100_000
    assert written(str(upper / "link")) == Written(complete=False)
    assert written(str(tmp_path / "nowhere")) == Written(complete=False)


def test_a_count_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (tmp_path / f"{number}").touch()
    assert written(str(tmp_path), limit=10) == Written(files=10)
    assert written(str(tmp_path), limit=9) == Written(files=9, complete=False)
    deep = tmp_path / "deep"
    (deep / "1/2/3/4/5/6/7/8").mkdir(parents=True)
    monkeypatch.setattr(written_module, "DEPTH", 4)
    before = len(os.listdir("/proc/self/fd"))
    assert written(str(deep)) == Written(directories=4, complete=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tree_deeper_than_any_path_is_counted_as_far_as_it_goes(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(200):
        name = "d" * 100
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert written(str(tmp_path)) == Written(directories=written_module.DEPTH, complete=False)
