from __future__ import annotations

from pathlib import Path

import pytest
from support.layouts import Layout

from layerstore.digest import Digest
from layerstore.errors import UsageError
from layerstore.oci.source_name import SourceName

DIGEST = Digest.of(b"x")


def parsed(text: str, *there: str) -> SourceName:
    """Parse ``text`` where only the paths ``there`` exist."""
    return SourceName.parse(text, exists=lambda transport, path: path in there)


@pytest.mark.case("M16")
@pytest.mark.parametrize("transport", ["oci", "oci-archive", "docker-archive"])
@pytest.mark.parametrize(
    ("rest", "there", "path", "tag"),
    [
        ("dir", (), "dir", None),
        ("dir:tag", (), "dir", "tag"),
        ("dir:", (), "dir", None),
        ("/a/b.tar:tag", (), "/a/b.tar", "tag"),
        ("dir:with:colon:tag", (), "dir", "with:colon:tag"),
        ("dir:with:colon:tag", ("dir", "dir:with"), "dir", "with:colon:tag"),
        ("dir:with:colon:tag", ("dir:with",), "dir:with", "colon:tag"),
        ("dir:with:colon:tag", ("dir:with:colon:tag",), "dir:with:colon:tag", None),
        ("dir:docker.io/library/debian:12", ("dir",), "dir", "docker.io/library/debian:12"),
        ("/a:b/c:tag", ("/a:b/c",), "/a:b/c", "tag"),
        ("/a:b/c", ("/a:b/c",), "/a:b/c", None),
        ("user@host/x:tag", (), "user@host/x", "tag"),
        ("x@y", (), "x@y", None),
        ("x@0", ("x@0",), "x@0", None),
        ("x@0:tag", ("x@0",), "x@0", "tag"),
        ("x:a@b", (), "x", "a@b"),
        ("x:@y", (), "x", "@y"),
    ],
)
def test_paths_and_tags(transport: str, rest: str, there: tuple[str, ...], path: str, tag: str | None) -> None:
    name = parsed(f"{transport}:{rest}", *there)
    assert (name.transport, name.path, name.tag) == (transport, path, tag)
    assert (name.position, name.digest) == (None, None)


@pytest.mark.case("M16")
@pytest.mark.parametrize("separator", ["@", ":@"])
def test_positions_and_digests(separator: str) -> None:
    assert parsed(f"oci:/path{separator}0") == SourceName("oci", "/path", position=0)
    assert parsed(f"oci:/path{separator}12") == SourceName("oci", "/path", position=12)
    assert parsed(f"oci:/path{separator}{DIGEST}") == SourceName("oci", "/path", digest=DIGEST)
    assert parsed(f"oci-archive:a:b{separator}3", "a:b") == SourceName("oci-archive", "a:b", position=3)


@pytest.mark.case("M16")
def test_spelling() -> None:
    for text in ("oci:dir", "oci:dir:tag", "oci:dir@1", f"oci:dir@{DIGEST}", "tar:-", "docker://docker.io/library/a:b"):
        assert str(parsed(text)) == text
    assert str(parsed("tree:a\nb\udcff")) == "tree:a\\x0ab\\xff"


@pytest.mark.case("M16")
def test_single_layers_and_trees_have_no_tags() -> None:
    assert parsed("tar:-") == SourceName("tar", "-")
    assert parsed("tar:a:b@0") == SourceName("tar", "a:b@0")
    assert parsed("tree:./tools:x") == SourceName("tree", "./tools:x")


@pytest.mark.case("M16")
def test_registries() -> None:
    name = parsed("docker://localhost:5000/img")
    assert name.reference is not None
    assert (name.reference.host, name.reference.path, name.reference.tag) == ("localhost:5000", "img", "latest")
    with pytest.raises(UsageError, match="docker://REFERENCE"):
        parsed("docker:a")
    with pytest.raises(UsageError, match="lower case"):
        parsed("docker://A/b")


@pytest.mark.parametrize("text", ["", "debian:12", "debian", "OCI:dir", "docker-daemon:x", "containers-storage:x"])
def test_unknown_transports(text: str) -> None:
    with pytest.raises(UsageError, match="start it with oci:, oci-archive:, docker-archive:, tar:, tree: or docker://"):
        parsed(text)


@pytest.mark.parametrize("text", ["oci:", "oci::tag", "oci:@0", "tar:", "tree:", "oci:a\0b", "tar:a\0b", "oci:\ud800"])
def test_paths_that_are_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(text)
    assert "\0" not in str(caught.value)


@pytest.mark.case("M16")
def test_real_paths_decide(tmp_path: Path) -> None:
    Layout(tmp_path / "a:b")
    (tmp_path / "a").mkdir()
    archive = tmp_path / "x:y.tar"
    archive.write_bytes(b"")
    assert SourceName.parse(f"oci:{tmp_path}/a:b:tag").path == f"{tmp_path}/a:b", "an empty directory is no layout"
    assert SourceName.parse(f"oci-archive:{archive}:tag") == SourceName("oci-archive", str(archive), tag="tag")
    assert SourceName.parse(f"oci-archive:{tmp_path}/a:b").path == f"{tmp_path}/a", "a directory is no archive"
