"""``imgtool export``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.exports import documents
from support.faults import fsync_for_free
from support.tars import fifo, file, tar

from imgtool.cli import run
from imgtool.exitcodes import ExitCode

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("IMGTOOL_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    with fsync_for_free():
        site = Site(tmp_path)
        site.convert(site.image([tar(file("data", noise(100_000, 1)), fifo("pipe"))]), tag="it")
        site.convert(site.tar(file("a")), tag="anywhere")

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["export", *arguments])
        return (int(code), *capsys.readouterr())

    return call


def test_an_ordinary_image(call: Call, tmp_path: Path) -> None:
    code, out, err = call("it", "oci:out:v1")
    assert (code, err) == (0, "")
    assert out.startswith("oci:out:v1: sha256:")
    assert "1 layer(s), " in out
    code, out, err = call("it", "oci:out:v2", "--compression", "none", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["target"] == "oci:out:v2"
    [layer] = document["layers"]
    assert layer["media_type"] == "application/vnd.oci.image.layer.v1.tar"
    assert layer["digest"] == layer["diff_id"]
    assert layer["bytes"] == layer["bytes_raw"] == (tmp_path / "out/blobs/sha256" / layer["digest"][7:]).stat().st_size


@pytest.mark.parametrize(
    ("options", "media_type"),
    [
        ((), "application/vnd.erofs.layer.v1+zstd"),
        (("--form", "2.3", "--compression", "none"), "application/vnd.erofs.layer.v1"),
        (("--form", "2.1"), "application/vnd.oci.image.layer.v1.erofs"),
    ],
)
def test_for_containerd(call: Call, tmp_path: Path, options: tuple[str, ...], media_type: str) -> None:
    code, out, err = call("it", "--for", "containerd", *options, "oci:out:v1", "--json")
    assert (code, err) == (0, "")
    assert [layer["media_type"] for layer in json.loads(out)["layers"]] == [media_type]
    assert documents(tmp_path / "out", "v1")[0]["layers"][0]["mediaType"] == media_type


def test_a_content_cache(call: Call, tmp_path: Path) -> None:
    code, out, err = call("it", "--for", "containerd", "cache:layers", "--json")
    assert (code, err) == (0, "")
    [layer] = json.loads(out)["layers"]
    assert layer["written"] is True
    for diff_id in layer["diff_ids"]:
        value = diff_id.removeprefix("sha256:")
        assert (tmp_path / "layers/sha256" / value[:2] / f"{value}.erofs").stat().st_size == layer["bytes"]
    code, out, err = call("it", "--for", "containerd", "cache:layers")
    assert (code, err) == (0, "")
    assert " there already: sha256:" in out


def test_an_archive_and_a_platform(call: Call, tmp_path: Path) -> None:
    code, _, err = call("anywhere", "oci-archive:out.tar:v1")
    assert code == 0
    assert err.startswith("imgtool: warning: 'anywhere' names no architecture")
    code, _, err = call("anywhere", "oci-archive:out.tar:v1", "--platform", "linux/amd64")
    assert (code, err) == (0, "")
    assert (tmp_path / "out.tar").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("it", "oci:out", "--form", "2.1"), ExitCode.USAGE, "--form is containerd's"),
        (("it", "out"), ExitCode.USAGE, "not a target: 'out'"),
        (("it", "cache:x"), ExitCode.USAGE, "cache:DIR goes with --for containerd"),
        (("it", "cache:x", "--for", "containerd", "--form", "2.3"), ExitCode.USAGE, "without --form"),
        (("it", "cache:", "--for", "containerd"), ExitCode.USAGE, "cache: needs a path"),
        (("it", "oci:out", "--for", "docker"), ExitCode.USAGE, "'docker'"),
        (("no", "oci:out"), ExitCode.NOT_FOUND, "no"),
        (("it", "oci:out@3"), ExitCode.USAGE, "a target has a tag"),
    ],
)
def test_what_is_refused(call: Call, tmp_path: Path, arguments: tuple[str, ...], code: ExitCode, text: str) -> None:
    before = sorted(tmp_path.iterdir())
    got, out, err = call(*arguments)
    assert (got, out) == (code, "")
    assert text in err
    assert err.startswith("imgtool: ") and err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
