from __future__ import annotations

import os

import pytest

from layerstore.errors import MalformedError, UsageError
from layerstore.oci.platform import Platform, host


def ranking(request: str, *offers: str) -> list[str]:
    """The offers that serve the request, best first."""
    wanted = Platform.parse(request)
    ranks = [(rank, offer) for offer in offers if (rank := wanted.rank(Platform.parse(offer))) is not None]
    return [offer for _, offer in sorted(ranks, key=lambda pair: pair[0], reverse=True)]


@pytest.mark.case("M03")
@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("linux/amd64", "linux/amd64"),
        ("Linux/X86_64", "linux/amd64"),
        ("linux/x86-64", "linux/amd64"),
        ("linux/amd64/v1", "linux/amd64"),
        ("linux/amd64/v3", "linux/amd64/v3"),
        ("linux/aarch64", "linux/arm64"),
        ("linux/arm64/v8", "linux/arm64"),
        ("linux/arm64/8", "linux/arm64"),
        ("linux/arm64/v8.0", "linux/arm64"),
        ("linux/arm64/v9", "linux/arm64/v9"),
        ("linux/arm64/v8.2", "linux/arm64/v8.2"),
        ("linux/arm", "linux/arm/v7"),
        ("linux/arm/6", "linux/arm/v6"),
        ("linux/armhf", "linux/arm/v7"),
        ("linux/armel", "linux/arm/v6"),
        ("linux/i386", "linux/386"),
        ("macos/arm64", "darwin/arm64"),
        ("linux/riscv64", "linux/riscv64"),
        ("linux/mips/softfloat", "linux/mips/softfloat"),
        ("windows(10.0.17763)/amd64", "windows(10.0.17763)/amd64"),
        ("linux(+erofs)/amd64", "linux(+erofs)/amd64"),
        ("windows(10.0+b+a)/amd64", "windows(10.0+a+b)/amd64"),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    platform = Platform.parse(text)
    assert str(platform) == normal
    assert Platform.parse(normal) == platform


@pytest.mark.parametrize("text", ["", "linux", "linux/", "/amd64", "linux/amd64/", "a/b/c/d", "linux/am d64", "l(/x"])
def test_not_a_platform(text: str) -> None:
    with pytest.raises(UsageError, match="os/architecture"):
        Platform.parse(text)


@pytest.mark.case("M02")
def test_variants_that_serve_a_request() -> None:
    arms = ("linux/arm/v5", "linux/arm/v6", "linux/arm/v7")
    for request in ("linux/arm64", "linux/arm64/v8"):
        assert ranking(request, "linux/arm64") == ["linux/arm64"]
        assert ranking(request, "linux/arm64/v8") == ["linux/arm64/v8"]
        assert ranking(request, "linux/arm64/v9") == []
        assert ranking(request, *arms) == []
    assert ranking("linux/arm64/v9", "linux/arm64", "linux/arm64/v9") == ["linux/arm64/v9", "linux/arm64"]
    assert ranking("linux/arm", *arms) == ["linux/arm/v7", "linux/arm/v6", "linux/arm/v5"]
    assert ranking("linux/arm/v7", *arms) == ["linux/arm/v7", "linux/arm/v6", "linux/arm/v5"]
    assert ranking("linux/arm/v6", *arms) == ["linux/arm/v6", "linux/arm/v5"]
    assert ranking("linux/arm/v8", *arms)[0] == "linux/arm/v7"


@pytest.mark.case("M02")
def test_minor_arm_versions_follow_the_architecture_manual() -> None:
    assert ranking("linux/arm64/v9", "linux/arm64/v8.5", "linux/arm64/v8.6") == ["linux/arm64/v8.5"]
    assert ranking("linux/arm64/v9.1", "linux/arm64/v8.6", "linux/arm64/v9.1", "linux/arm64/v9") == [
        "linux/arm64/v9.1",
        "linux/arm64/v9",
        "linux/arm64/v8.6",
    ]
    assert ranking("linux/arm64/v8.3", "linux/arm64/v8.4", "linux/arm64/v8.2") == ["linux/arm64/v8.2"]


@pytest.mark.case("M02")
def test_amd64_levels_and_nonsense() -> None:
    assert ranking("linux/amd64", "linux/amd64/v2") == []
    assert ranking("linux/amd64/v3", "linux/amd64", "linux/amd64/v2", "linux/amd64/v4") == [
        "linux/amd64/v2",
        "linux/amd64",
    ]
    assert ranking("linux/amd64", "linux/amd64/v7") == []
    assert ranking("linux/amd64", "linux/386") == []
    assert ranking("linux/mips/x", "linux/mips/y", "linux/mips/x", "linux/mips") == ["linux/mips/x"]


def test_versions_and_features_of_the_system() -> None:
    wanted = Platform.parse("linux/amd64")
    assert wanted.rank(Platform.parse("linux(+erofs)/amd64")) is None
    assert Platform.parse("linux(+erofs)/amd64").rank(wanted) is not None
    assert Platform.parse("windows/amd64").rank(Platform.parse("windows(1)/amd64")) is not None
    assert Platform.parse("windows(2)/amd64").rank(Platform.parse("windows(1)/amd64")) is None
    assert wanted.rank(Platform.parse("windows/amd64")) is None


def test_from_json() -> None:
    document = {"os": "linux", "architecture": "ARM64", "variant": None, "os.features": None, "more": 1}
    assert Platform.from_json(document, "p") == Platform("linux", "arm64")
    assert Platform.from_json({}, "p") == Platform("", "")
    bad_documents: list[object] = [{"os": 1}, {"os.features": "x"}, {"os.features": [1]}, {"variant": []}, []]
    for bad in bad_documents:
        with pytest.raises(MalformedError, match="p"):
            Platform.from_json(bad, "p")


def test_unknown_marks_attestations() -> None:
    assert Platform("unknown", "unknown").is_unknown
    assert not Platform("linux", "unknown").is_unknown
    assert str(Platform("", "a\nb")) == "?/a\\x0ab"


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("x86_64", Platform("linux", "amd64")),
        ("aarch64", Platform("linux", "arm64")),
        ("armv7l", Platform("linux", "arm", "v7")),
        ("armv6l", Platform("linux", "arm", "v6")),
        ("i686", Platform("linux", "386")),
        ("riscv64", Platform("linux", "riscv64")),
    ],
)
def test_host(monkeypatch: pytest.MonkeyPatch, machine: str, expected: Platform) -> None:
    name = os.uname_result(("Linux", "host", "6", "1", machine))
    monkeypatch.setattr(os, "uname", lambda: name)
    assert host() == expected
