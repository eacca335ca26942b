from __future__ import annotations

import json
from typing import Any

import pytest
from support.layouts import config_of

from layerstore.digest import Digest
from layerstore.errors import LimitError, MalformedError, UnsupportedError
from layerstore.oci.config import ImageConfig, RunConfig
from layerstore.oci.document import CONFIG_BYTES
from layerstore.oci.platform import Platform

A, B, NEW = (Digest.of(name) for name in (b"a", b"b", b"new"))


def config(*diff_ids: Digest, **fields: Any) -> ImageConfig:
    return ImageConfig.parse(json.dumps(config_of([str(digest) for digest in diff_ids], **fields)).encode(), "c")


def test_view() -> None:
    parsed = config(
        A,
        B,
        variant="v2",
        config={
            "Env": ["A=1", "B"],
            "Entrypoint": ["/init"],
            "Cmd": None,
            "User": "1000:1000",
            "WorkingDir": "/src",
            "Labels": {"ü": "☃"},
            "Volumes": {"/data": {}},
            "ExposedPorts": {"80/tcp": {}},
            "StopSignal": "SIGINT",
            "ArgsEscaped": True,
        },
    )
    assert parsed.platform == Platform("linux", "amd64", "v2")
    assert parsed.diff_ids == (A, B)
    assert parsed.run == RunConfig(
        env=("A=1", "B"),
        entrypoint=("/init",),
        cmd=None,
        user="1000:1000",
        working_dir="/src",
        labels=(("ü", "☃"),),
        volumes=("/data",),
        exposed_ports=("80/tcp",),
        stop_signal="SIGINT",
    )


def test_sparse_configs() -> None:
    parsed = ImageConfig.parse(b"{}", "c")
    assert (parsed.platform, parsed.diff_ids, parsed.run) == (Platform("", ""), (), RunConfig())
    assert config(config=None).run == RunConfig()
    assert config(config={"Cmd": "sh", "Env": None}).run.cmd == ("sh",)
    assert ImageConfig.parse(b'{"rootfs":{"type":"layers","diff_ids":null}}', "c").diff_ids == ()


@pytest.mark.case("Z20")
def test_a_converted_config_keeps_what_nobody_here_knows() -> None:
    raw = (
        '{"x-vendor":{"deep":[1,{"big":123456789012345678901234567890}]},"architecture":"amd64","os":"linux",'
        '"config":{"Volumes":{"/data":{}},"OnBuild":["RUN x"],'
        '"Healthcheck":{"Test":["CMD","true"],"Interval":30000000000},'
        '"Labels":{"größe":"☃ 😀"},"Memory":9007199254740993},'
        '"rootfs":{"type":"layers","diff_ids":["DIFF-ID"],"x-root":1},"history":[{"created_by":"old"}],'
        '"os.features":["win32k"],"docker_version":"27"}'
    ).replace("DIFF-ID", str(A))
    parsed = ImageConfig.parse(raw.encode(), "c")
    history = [{"created_by": "imgtool", "comment": "ü"}]
    made = parsed.with_rootfs([NEW], history, ["erofs", "win32k"])
    before, after = json.loads(raw), json.loads(made)
    assert after["rootfs"] == {"type": "layers", "diff_ids": [str(NEW)], "x-root": 1}
    assert after["history"] == history
    assert after["os.features"] == ["win32k", "erofs"]
    for name in ("rootfs", "history", "os.features"):
        del before[name], after[name]
    assert after == before
    assert list(after) == list(before)
    assert "created" not in after
    assert made == parsed.with_rootfs([NEW], history, ["erofs", "win32k"])
    assert ImageConfig.parse(made, "c").diff_ids == (NEW,)


@pytest.mark.case("Z20")
def test_only_the_root_file_system_changes_when_there_was_none() -> None:
    made = json.loads(ImageConfig.parse(b'{"os":"linux"}', "c").with_rootfs([A, B], None))
    assert made == {"os": "linux", "rootfs": {"type": "layers", "diff_ids": [str(A), str(B)]}}
    assert "history" not in json.loads(config(A, history=[{}]).with_rootfs([NEW], None))


@pytest.mark.case("Z20")
def test_duplicate_keys_warn_and_the_last_one_counts() -> None:
    heard: list[str] = []
    raw = b'{"os":"linux","architecture":"amd64","config":{"User":"a","User":"b"}}'
    assert ImageConfig.parse(raw, "c", warn=heard.append).run.user == "b"
    assert heard == ["c has the key 'User' twice; the last one counts"]
    assert ImageConfig.parse(raw, "c").run.user == "b"


EMPTY_LAYER = Digest.parse("sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef")
"""The diff ID of Docker's empty layer, an end-of-archive marker and nothing else."""


@pytest.mark.case("M08")
@pytest.mark.parametrize(
    ("parsed", "layers", "warned"),
    [
        (config(A, B, history=[{}, {"empty_layer": True}, {"empty_layer": False}]), 2, False),
        (config(A, B), 2, False),
        (config(A, B, history=[]), 2, False),
        (config(A, B, history=[{}, {}, {}]), 2, True),
        (config(A, B, history=[{"empty_layer": True}]), 2, True),
        (config(EMPTY_LAYER, EMPTY_LAYER), 2, False),
        (config(), 0, False),
        (config(history=[{"empty_layer": True}]), 0, False),
    ],
)
def test_history_is_only_informative(parsed: ImageConfig, layers: int, warned: bool) -> None:
    heard: list[str] = []
    parsed.check_layers(layers, "c", heard.append)
    assert len(parsed.diff_ids) == layers
    assert bool(heard) == warned
    assert all("history is ignored" in line for line in heard)


@pytest.mark.case("M08")
@pytest.mark.parametrize(("parsed", "layers"), [(config(A), 2), (config(A, B), 1), (config(), 1), (config(A), 0)])
def test_diff_ids_pair_with_layers(parsed: ImageConfig, layers: int) -> None:
    with pytest.raises(MalformedError, match=f"c: the manifest has {layers} layers .* {len(parsed.diff_ids)} diff IDs"):
        parsed.check_layers(layers, "c", lambda line: None)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({"os": 1}, "'os' is an integer"),
        ({"architecture": []}, "'architecture' is an array"),
        ({"rootfs": []}, "rootfs is an array"),
        ({"rootfs": {"diff_ids": "x"}}, "diff_ids is a string"),
        ({"rootfs": {"diff_ids": [str(A), "sha256:x"]}}, r"diff_ids\[1\] is not a digest: 'sha256:x'"),
        ({"rootfs": {"diff_ids": [None]}}, r"diff_ids\[0\] is not a digest: null"),
        ({"config": []}, "c: config is an array"),
        ({"config": {"Env": [1]}}, "config.Env"),
        ({"config": {"Env": "A=1"}}, "config.Env"),
        ({"config": {"Cmd": {"a": 1}}}, "config.Cmd"),
        ({"config": {"User": 0}}, "config.User is an integer"),
        ({"config": {"Labels": {"a": 1}}}, r"config.Labels\['a'\] is an integer"),
        ({"config": {"Volumes": ["/data"]}}, "config.Volumes is an array"),
    ],
)
def test_wrong_types(document: dict[str, Any], complaint: str) -> None:
    with pytest.raises(MalformedError, match=complaint):
        ImageConfig.parse(json.dumps(document).encode(), "c")


def test_what_is_not_handled() -> None:
    with pytest.raises(UnsupportedError, match=r"rootfs is of type 'layers\+base'"):
        config(A, rootfs={"type": "layers+base", "diff_ids": []})
    with pytest.raises(UnsupportedError, match=r"diff_ids\[0\]: digest algorithm 'blake3'"):
        config(rootfs={"type": "layers", "diff_ids": ["blake3:" + "a" * 64]})
    with pytest.raises(LimitError, match="more than the limit"):
        ImageConfig.parse(b" " * (CONFIG_BYTES + 1), "c")
