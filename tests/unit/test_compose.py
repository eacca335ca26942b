"""Stacks: order, conflicts, the merged config, and what doesn't fit together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.conversions import Site, expected_rows, noise
from support.faults import fsync_for_free
from support.layouts import config_of, encode
from support.tars import directory, file, hardlink, opaque, symlink, tar, whiteout

from layerstore.compose import merge_configs, plan_stack, publish_stack
from layerstore.errors import ConflictError, CorruptError, NotFoundError, UsageError
from layerstore.image import Role, load_image, read_document
from layerstore.oci.config import ImageConfig
from layerstore.oci.platform import Platform
from layerstore.pack.chunks import Sizes
from layerstore.store.collect import collect, plan_collection

BASE = tar(
    directory("etc"),
    file("etc/motd", b"base"),
    file("bin/tool", b"base tool"),
    directory("opt/a"),
    file("opt/a/old", b"old"),
    file("gone", b"gone"),
    file("data", noise(100_000, 1)),
)
WORK = tar(file("etc/motd", b"work"), whiteout("gone"), directory("opt/a"), opaque("opt/a"), file("src/main", b"main"))
TOOLS = tar(
    file("bin/tool", b"better tool"), symlink("etc/motd", "x"), file("src/extra", b"e"), hardlink("t", "bin/tool")
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A base, a workspace over it, and two toolkits."""
    with fsync_for_free():
        site = Site(tmp_path)
        site.convert(site.image([BASE]), tag="base")
        site.convert(site.image([BASE, WORK]), Role.WORKSPACE, base="base", tag="work")
        site.convert(site.image([TOOLS]), Role.TOOLKIT, tag="tools")
        site.convert(site.tar(file("bin/tool", b"best tool")), Role.TOOLKIT, tag="more")
        yield site


def test_layers_lie_in_order_and_the_last_one_wins(site: Site) -> None:
    stack = plan_stack(site.store, base="base", workspace="work", toolkits=["tools", "more"])
    assert stack.names == ("base", "work", "tools", "more")
    assert [layer.role for layer in stack.image.layers] == [Role.BASE, Role.WORKSPACE, Role.TOOLKIT, Role.TOOLKIT]
    before = site.blobs()
    image = publish_stack(site.store, stack, tag="env")
    assert load_image(site.store, "env") == image
    rows = site.rows("env")
    assert rows[b"bin/tool"].value == b"best tool"
    assert rows[b"t"].value == b"better tool"
    assert rows[b"etc/motd"].value == b"x"
    assert rows[b"src/main"].value == b"main" and rows[b"src/extra"].value == b"e"
    assert b"gone" not in rows and b"opt/a/old" not in rows and rows[b"opt/a"].type == "Directory"
    assert len(site.blobs()) == len(before) + 2, "a config and a manifest"
    other_way = publish_stack(
        site.store, plan_stack(site.store, base="base", workspace="work", toolkits=["more", "tools"]), tag="other"
    )
    assert site.rows(other_way)[b"bin/tool"].value == b"better tool"


def test_every_conflict_is_listed_with_its_winner(site: Site) -> None:
    stack = plan_stack(site.store, base="base", workspace="work", toolkits=["tools", "more"])
    found = {
        conflict.path: (conflict.kind, [stack.names[n] for n in conflict.layers], stack.names[conflict.winner])
        for conflict in stack.conflicts
    }
    assert found == {
        b"bin/tool": ("file-over-file", ["base", "tools", "more"], "more"),
        b"etc/motd": ("type-change", ["base", "work", "tools"], "tools"),
        b"gone": ("whiteout-hides", ["base"], "work"),
        b"opt/a": ("opaque-hides", ["base", "work"], "work"),
    }
    assert [conflict.path for conflict in stack.conflicts] == sorted(found)


def test_planning_changes_nothing(site: Site) -> None:
    before = site.snapshot()
    first = plan_stack(site.store, base="base", workspace="work", toolkits=["tools"])
    assert site.snapshot() == before
    assert first == plan_stack(site.store, base="base", workspace="work", toolkits=["tools"])


def test_a_base_alone_is_a_stack(site: Site) -> None:
    image = publish_stack(site.store, plan_stack(site.store, base="base"), tag="alone")
    assert site.rows(image) == expected_rows(BASE)
    assert len(image.layers) == 1


def test_names_may_be_digests(site: Site) -> None:
    digest = str(site.store.resolve("base").digest)
    stack = plan_stack(site.store, base=digest, workspace="work")
    assert stack.names == (digest, "work")


def test_publishing_the_same_twice_gives_the_same(site: Site) -> None:
    stack = plan_stack(site.store, base="base", workspace="work")
    first = publish_stack(site.store, stack, tag="env")
    assert publish_stack(site.store, stack, tag="env") == first
    assert publish_stack(site.store, stack, tag=None).descriptor() == first.descriptor()
    document = json.loads(read_document(site.store, first.config, "config"))
    raw = [str(digest) for layer in first.layers for digest in layer.raw_digests]
    assert document["rootfs"] == {"type": "layers", "diff_ids": raw}


@pytest.mark.case("G01")
def test_a_stack_keeps_its_layers_alive(site: Site) -> None:
    publish_stack(site.store, plan_stack(site.store, base="base", workspace="work", toolkits=["tools"]), tag="env")
    for name in ("base", "work", "tools", "more"):
        site.store.delete_reference(name, expected=site.store.resolve(name))
    collect(site.store, plan_collection(site.store, grace=0))
    assert site.rows("env")[b"data"].value == noise(100_000, 1)


def test_a_layer_that_vanished_between_plan_and_publication(site: Site) -> None:
    stack = plan_stack(site.store, base="base", toolkits=["more"])
    site.blob_path(stack.image.layers[1].blob).unlink()
    with pytest.raises(ConflictError, match="publish again"):
        publish_stack(site.store, stack, tag="env")
    assert "env" not in list(site.store.names())
    assert site.leftovers() == []


# -- what doesn't fit -------------------------------------------------------------------------------------------------


def test_each_place_takes_its_role_alone(site: Site) -> None:
    publish_stack(site.store, plan_stack(site.store, base="base", workspace="work"), tag="env")
    for fields, text in (
        ({"base": "work"}, "'work' is a workspace, not a base"),
        ({"base": "base", "workspace": "tools"}, "'tools' is a toolkit, not a workspace"),
        ({"base": "base", "toolkits": ["base"]}, "'base' is a base, not a toolkit"),
        ({"base": "env"}, "'env' is a stack already"),
        ({"base": "base", "toolkits": ["tools", "tools"]}, "'tools' is the same layer as 'tools'; a stack has each"),
    ):
        with pytest.raises(UsageError, match=text):
            plan_stack(site.store, **fields)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="nothing"):
        plan_stack(site.store, base="base", toolkits=["nothing"])


def test_a_base_that_was_converted_again_is_the_same_base(site: Site) -> None:
    source = site.image([BASE, tar(file("big", noise(300_000, 1)))])
    first = site.convert(source, tag="again")
    site.convert(
        site.image([BASE, tar(file("big", noise(300_000, 1))), WORK]), Role.WORKSPACE, base="again", tag="over"
    )
    again = site.convert(source, tag="again", sizes=Sizes(chunk=8192))
    assert again.layer.metadata != first.layer.metadata
    stack = plan_stack(site.store, base="again", workspace="over")
    assert stack.image.layers[0] == again.layer
    rows = site.rows(publish_stack(site.store, stack, tag="both"))
    assert rows[b"big"].value == noise(300_000, 1)
    assert rows[b"etc/motd"].value == b"work"


def test_a_workspace_over_another_base_needs_force(site: Site) -> None:
    other = tar(file("etc/motd", b"other"), file("gone", b"here too"), directory("opt/a"))
    base = site.convert(site.image([other]), tag="other")
    work = site.convert(site.image([BASE]), tag="base").layer
    with pytest.raises(ConflictError) as caught:
        plan_stack(site.store, base="other", workspace="work")
    assert str(caught.value) == (
        f"'work' was made over base layer {work.metadata}, not over 'other' ({base.layer.metadata}); "
        "convert it over that base, or --force"
    )
    stack = plan_stack(site.store, base="other", workspace="work", force=True)
    rows = site.rows(publish_stack(site.store, stack, tag="forced"))
    assert rows[b"etc/motd"].value == b"work"
    assert b"gone" not in rows


@pytest.mark.case("T12")
def test_a_whiteout_that_would_be_seen_is_refused_even_with_force(site: Site) -> None:
    base = tar(directory("only/here"), file("only/here/f", b"f"))
    site.convert(site.image([base]), tag="with")
    site.convert(site.image([base, tar(whiteout("only/here/f"))]), Role.TOOLKIT, base="with", tag="deleting")
    with pytest.raises(ConflictError, match="'deleting' deletes /only/here/f from a directory that no layer below has"):
        plan_stack(site.store, base="base", toolkits=["deleting"], force=True)
    rows = site.rows(publish_stack(site.store, plan_stack(site.store, base="with", toolkits=["deleting"]), tag="ok"))
    assert rows[b"only/here"].type == "Directory" and b"only/here/f" not in rows


@pytest.mark.case("C05")
def test_damaged_parts_are_named(site: Site) -> None:
    stack = plan_stack(site.store, base="base", workspace="work")
    layer = stack.image.layers[1]
    config = load_image(site.store, "work").config.digest
    for digest, text in (
        (layer.blob, str(layer.metadata)),
        (config, str(config)),
        (site.store.resolve("work").digest, "manifest of 'work'"),
    ):
        intact = site.blob_path(digest).read_bytes()
        site.flip(digest)
        with pytest.raises(CorruptError, match=text):
            plan_stack(site.store, base="base", workspace="work")
        site.blob_path(digest).write_bytes(intact)


# -- configs ----------------------------------------------------------------------------------------------------------


def config(run: dict[str, Any] | None = None, **fields: Any) -> ImageConfig:
    return ImageConfig.parse(encode(config_of([], **{"config": run or {}, **fields})), "config")


ROLES = (Role.BASE, Role.WORKSPACE, Role.TOOLKIT, Role.TOOLKIT)
NAMES = ("base", "work", "tools", "more")


def merge(*configs: ImageConfig) -> dict[str, Any]:
    return dict(merge_configs(configs, ROLES[: len(configs)], NAMES[: len(configs)]).document)


def run_of(*runs: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = merge(*(config(run) for run in runs))["config"]
    return section


SETTINGS: dict[str, tuple[Any, Any, Any]] = {
    "User": ("root", "worker", "toolsmith"),
    "WorkingDir": ("/", "/src", "/opt"),
    "Entrypoint": (["init"], ["make"], ["tool"]),
    "Cmd": (["sh"], ["test"], ["--help"]),
    "StopSignal": ("SIGTERM", "SIGINT", "SIGKILL"),
    "Healthcheck": ({"Test": ["CMD", "a"]}, {"Test": ["CMD", "b"]}, {"Test": ["NONE"]}),
    "Shell": (["/bin/sh"], ["/bin/bash"], ["/bin/zsh"]),
    "Unknown": ({"x": 1}, {"y": 2}, {"z": 3}),
    "StopTimeout": (10, 0, 30),
}


@pytest.mark.parametrize("key", SETTINGS)
def test_settings_are_the_workspaces_where_it_says_something_else_the_bases(key: str) -> None:
    base, work, tools = SETTINGS[key]
    assert run_of({key: base}, {key: work}, {key: tools})[key] == work
    assert run_of({key: base}, {}, {key: tools})[key] == base
    for nothing in (None, *([] if isinstance(base, int) else [type(base)()])):
        assert run_of({key: base}, {key: nothing}, {})[key] == base
    assert run_of({}, {key: work}, {})[key] == work
    assert key not in run_of({}, {}, {key: tools})


def test_an_entrypoint_of_the_workspace_takes_the_bases_command_away() -> None:
    base = {"Entrypoint": ["init"], "Cmd": ["sh"]}
    assert run_of(base, {"Entrypoint": ["make"]}) == {"Entrypoint": ["make"]}
    assert run_of(base, {"Entrypoint": ["make"], "Cmd": ["all"]}) == {"Entrypoint": ["make"], "Cmd": ["all"]}
    assert run_of(base, {"Cmd": ["all"]}) == {"Entrypoint": ["init"], "Cmd": ["all"]}
    assert run_of(base, {}, {"Entrypoint": ["tool"]}) == base


def test_environments_are_joined_and_the_last_value_wins() -> None:
    merged = run_of(
        {"Env": ["PATH=/usr/bin:/bin", "LANG=C", "ONLY=base"]},
        {"Env": ["LANG=de", "PATH=/work/bin:/bin", "EMPTY="]},
        {"Env": ["EXTRA=a=b", "PATH=/tools"]},
        {"Env": ["LANG=fr"]},
    )
    assert merged["Env"] == [
        "PATH=/tools:/work/bin:/bin:/usr/bin",
        "LANG=fr",
        "ONLY=base",
        "EMPTY=",
        "EXTRA=a=b",
    ]
    assert run_of({"Env": ["PATH=/bin"]}, {"Env": ["PATH="]})["Env"] == ["PATH=/bin"]
    assert run_of({"Env": ["PATH="]}, {"Env": ["PATH=/bin"]})["Env"] == ["PATH=/bin"]
    assert run_of({"Env": ["PATH=/bin:"]}, {"Env": ["PATH=/x"]})["Env"] == ["PATH=/x:/bin:"]
    assert "Env" not in run_of({}, {})


@pytest.mark.parametrize("key", ["Labels", "Volumes", "ExposedPorts"])
def test_maps_are_joined_and_the_last_value_wins(key: str) -> None:
    def one(name: str) -> Any:
        return name if key == "Labels" else {name: {}}

    merged = run_of({key: {"a": one("base"), "b": one("base")}}, {key: {"b": one("work")}}, {key: {"c": one("tools")}})
    assert merged[key] == {"a": one("base"), "b": one("work"), "c": one("tools")}
    assert key not in run_of({}, {key: {}})


@pytest.mark.case("Z20")
def test_unknown_fields_outside_are_inherited_and_the_layers_own_are_not() -> None:
    merged = merge(
        config(author="base", created="2020-01-01T00:00:00Z", vendor={"x": 1}, history=[{"created_by": "x"}]),
        config(author="work", other=[1]),
        config(author="tools", secret="tools"),
    )
    assert (merged["author"], merged["created"], merged["vendor"], merged["other"]) == (
        "work", "2020-01-01T00:00:00Z", {"x": 1}, [1],
    )  # fmt: skip
    assert "secret" not in merged and "history" not in merged
    assert merged["rootfs"] == {"type": "layers", "diff_ids": []}


def on(architecture: str | None, variant: str | None = None, os: str | None = "linux") -> ImageConfig:
    return config(architecture=architecture, os=os, variant=variant)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([on("amd64"), on("amd64")], ("linux", "amd64", None)),
        ([on("amd64"), on("unknown")], ("linux", "amd64", None)),
        ([on("unknown"), on("arm64")], ("linux", "arm64", None)),
        ([on("unknown"), on("unknown")], ("linux", "unknown", None)),
        ([on(None), on("amd64"), on(None, os=None)], ("linux", "amd64", None)),
        ([on("amd64", os=None), on("amd64")], ("linux", "amd64", None)),
        ([on("arm", "v7"), on("arm", "v7")], ("linux", "arm", "v7")),
        ([on("x86_64"), on("amd64")], ("linux", "amd64", None)),
        ([on("aarch64"), on("arm64", "v8")], ("linux", "arm64", None)),
    ],
)
def test_one_platform(parts: list[ImageConfig], expected: tuple[str, str, str | None]) -> None:
    merged = merge(*parts)
    assert (merged["os"], merged["architecture"], merged.get("variant")) == expected


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([on("amd64"), on("arm64")], "'work' is for linux/arm64, 'base' for linux/amd64: a stack has one platform"),
        ([on("arm", "v7"), on("arm", "v6")], "'work' is for linux/arm/v6, 'base' for linux/arm/v7"),
        ([on("unknown"), on("amd64"), on("s390x")], "'tools' is for linux/s390x, 'work' for linux/amd64"),
        ([on("amd64"), on("amd64", os="windows")], "'work' is for windows/amd64"),
    ],
)
def test_two_platforms(parts: list[ImageConfig], text: str) -> None:
    with pytest.raises(ConflictError, match=text):
        merge(*parts)


def test_layers_for_other_platforms_are_refused_when_composed(site: Site) -> None:
    site.convert(site.tar(file("a")), Role.TOOLKIT, platform=Platform("linux", "arm64"), tag="arm-tools")
    with pytest.raises(ConflictError, match="'arm-tools' is for linux/arm64, 'base' for linux/amd64"):
        plan_stack(site.store, base="base", toolkits=["arm-tools"])


def test_a_merged_config_is_one_that_runs() -> None:
    merged = merge_configs(
        [config({"Env": ["A=1"], "Cmd": ["sh"], "User": "0"}), config({"WorkingDir": "/src"})], ROLES[:2], NAMES[:2]
    )
    assert merged.run.env == ("A=1",)
    assert merged.run.cmd == ("sh",)
    assert (merged.run.user, merged.run.working_dir) == ("0", "/src")
