"""The verbs that read, with a store behind HTTP: the same output; those that write refuse it in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.httpstore import StoreServer, page, status
from support.tars import directory, file, symlink

from imgtool.cli import run
from imgtool.exitcodes import ExitCode
from layerstore.image import Role
from layerstore.store.directory import DirectoryStore

CONTENT = noise(300_000, 1)
SECRET = "pass-phrase"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("IMGTOOL_ROOT", str(tmp_path / "root"))
    with fsync_for_free():
        site = Site(tmp_path)
        site.convert(site.tar(directory("bin"), file("bin/tool", CONTENT), symlink("tool", "bin/tool")), tag="one")
        site.convert(site.tar(file("bin/tool", b"else")), Role.TOOLKIT, tag="two")
    return site


@pytest.fixture
def server(site: Site) -> Iterator[StoreServer]:
    with StoreServer(site.store.root, listing=True) as server:
        yield server


@pytest.mark.parametrize(
    "command",
    [
        ["ls"],
        ["ls", "--json"],
        ["inspect", "one"],
        ["inspect", "one", "--json"],
        ["tree", "one"],
        ["cat", "one", "/tool"],
        ["dump", "one"],
        ["diff", "one", "two"],
        ["compose", "--base", "one", "--toolkit", "two", "--dry-run", "--json"],
    ],
)
def test_what_reads_reads_from_a_url(
    site: Site, server: StoreServer, capfdbinary: pytest.CaptureFixture[bytes], command: list[str]
) -> None:
    code = run([*command, "--store", site.store.root])
    local = capfdbinary.readouterr()
    assert run([*command, "--store", server.url]) == code in (ExitCode.OK, ExitCode.FINDINGS)
    assert capfdbinary.readouterr() == local
    assert local.err == b""
    assert local.out


def test_the_environment_may_name_a_url(
    server: StoreServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMGTOOL_STORE", server.url)
    assert run(["ls"]) == 0
    assert "one" in capsys.readouterr().out


def test_copy_from_a_url(site: Site, server: StoreServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fsync_for_free():
        assert run(["copy", "one", server.url, str(tmp_path / "other")]) == 0
    assert "copied 4 blob(s)" in capsys.readouterr().out
    assert DirectoryStore(str(tmp_path / "other")).resolve("one") == site.store.resolve("one")
    assert run(["verify", "--store", str(tmp_path / "other")]) == 0
    assert run(["copy", "one", f"{server.url}/nothing", str(tmp_path / "third")]) == ExitCode.NOT_FOUND
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "tar:-", "--role", "base", "--store"],
        ["compose", "--base", "one", "--toolkit", "two", "--tag", "x", "--store"],
        ["tag", "one", "other", "--store"],
        ["rm", "one", "--store"],
        ["gc", "--store"],
        ["verify", "--store"],
        ["raw", "one", "--store"],
        ["copy", "one", "./store"],
    ],
)
def test_what_writes_refuses_a_url(
    site: Site,
    server: StoreServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    monkeypatch.chdir(site.path)
    assert run([*command, server.url.replace("//", f"//user:{SECRET}@")]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err
        == "imgtool: a store behind a web server, or one of several mirrors, can only be read: name the place where it "
        "is written, a directory or a bucket\n"
    )
    assert server.requests() == 0


def test_failures_are_one_line_without_the_credentials(server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = server.url.replace("//", f"//user:{SECRET}@")
    server.listing = False
    for fault, code, words in (
        (None, ExitCode.UNSUPPORTED, "can't be listed"),
        (status(401), ExitCode.PERMISSION, "401 Unauthorized"),
        (status(404), ExitCode.NOT_FOUND, "is not a store"),
        (status(503), ExitCode.UNAVAILABLE, "503 Service Unavailable"),
        (page(), ExitCode.UNAVAILABLE, "web page"),
    ):
        server.behave()
        if fault is not None:
            server.misbehave(fault)
        assert run(["ls", "--store", url]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert words in err
        assert server.url in err
        assert SECRET not in err
        assert err.count("\n") == 1
    for location, code in (
        (f"nobodys://user:{SECRET}@bucket/", ExitCode.UNSUPPORTED),
        (f"s3://user:{SECRET}@bucket/", ExitCode.USAGE),
        (f"s3://bucket/?endpoint=http://user:{SECRET}@host/", ExitCode.USAGE),
        (f"http://host:{SECRET}/", ExitCode.USAGE),
        (f"http://host/?{SECRET}", ExitCode.USAGE),
    ):
        assert run(["ls", "--store", location]) == code
        assert SECRET not in capsys.readouterr().err
