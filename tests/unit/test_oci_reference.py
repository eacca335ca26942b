from __future__ import annotations

import pytest

from layerstore.errors import UnsupportedError, UsageError
from layerstore.oci.reference import DockerReference

SHA256 = "sha256:" + "0a" * 32
SHA512 = "sha512:" + "0b" * 64


@pytest.mark.case("M16")
@pytest.mark.parametrize(
    ("text", "host", "path", "tag"),
    [
        ("a", "docker.io", "library/a", "latest"),
        ("a:b", "docker.io", "library/a", "b"),
        ("docker.io/a", "docker.io", "library/a", "latest"),
        ("index.docker.io/a", "docker.io", "library/a", "latest"),
        ("docker.io/library/a", "docker.io", "library/a", "latest"),
        ("user/a", "docker.io", "user/a", "latest"),
        ("user/a:b", "docker.io", "user/a", "b"),
        ("localhost:5000/a", "localhost:5000", "a", "latest"),
        ("localhost/a", "localhost", "a", "latest"),
        ("host:5000/a:1", "host:5000", "a", "1"),
        ("test.com:5000", "docker.io", "library/test.com", "5000"),
        ("test.com/a", "test.com", "a", "latest"),
        ("test.com/library/a", "test.com", "library/a", "latest"),
        ("[::1]:5000/a:b", "[::1]:5000", "a", "b"),
        ("[2001:db8::1]/a/b", "[2001:db8::1]", "a/b", "latest"),
        ("HOST.example:80/a", "HOST.example:80", "a", "latest"),
        ("a.b/c__d/e--f/g.h:V1_.-x", "a.b", "c__d/e--f/g.h", "V1_.-x"),
        ("host/a", "docker.io", "host/a", "latest"),
    ],
)
def test_grammar(text: str, host: str, path: str, tag: str) -> None:
    reference = DockerReference.parse(text)
    assert (reference.host, reference.path, reference.tag, reference.digest) == (host, path, tag, None)
    assert reference.identifier == tag
    assert str(reference) == f"{host}/{path}:{tag}"
    assert DockerReference.parse(str(reference)) == reference


@pytest.mark.case("M16")
@pytest.mark.parametrize(
    ("text", "name", "tag", "digest"),
    [
        (f"host/a@{SHA256}", "docker.io/host/a", None, SHA256),
        (f"host:5000/a:1@{SHA512}", "host:5000/a", "1", SHA512),
        (f"localhost/a@{SHA512}", "localhost/a", None, SHA512),
        (f"a:b@{SHA256}", "docker.io/library/a", "b", SHA256),
    ],
)
def test_the_digest_wins_over_the_tag(text: str, name: str, tag: str | None, digest: str) -> None:
    reference = DockerReference.parse(text)
    assert (reference.name, reference.tag, str(reference.digest)) == (name, tag, digest)
    assert reference.identifier == digest
    assert DockerReference.parse(str(reference)) == reference


@pytest.mark.case("M16")
@pytest.mark.parametrize("text", ["A/b", "a/B", "A", "host:5000/A", "docker.io/library/A:x"])
def test_upper_case(text: str) -> None:
    with pytest.raises(UsageError, match="lower case"):
        DockerReference.parse(text)


@pytest.mark.case("M16")
@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "a:",
        "a:b:c",
        "a/",
        "/a",
        "a//b",
        "host:5000/",
        "host:port/a",
        "host:123456/a",
        "-x.y/a",
        "[::1/a",
        "[zz]:1/a",
        "a..b",
        "a_-b",
        "a:-b",
        "a:" + "x" * 129,
        "a@",
        "a@sha256:abc",
        "a@" + SHA256.upper(),
        "a b",
        "a\n",
        "ü",
        "localhost:5000/" + "a" * 300,
    ],
)
def test_nonsense(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        DockerReference.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.case("M11")
def test_digests_that_cannot_be_verified() -> None:
    with pytest.raises(UnsupportedError, match="md5"):
        DockerReference.parse("a@md5:" + "a" * 32)
