from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from layerstore.errors import UsageError
from layerstore.oci.config import RunConfig
from overlay.bundle import CAPABILITIES, runtime_config, write_bundle
from overlay.format import SandboxState, chain_of
from overlay.process import Process, User
from overlay.sandbox import Sandbox

PROCESS = Process(("sh", "-c", "true"), ("PATH=/bin",), "/srv", User(0, 0, (4, 5), "/root"))


def sandbox_in(directory: Path, *, read_only: bool = False) -> Sandbox:
    state = SandboxState("box", 0, "boot", "eager", read_only, None, (), chain_of(()), {}, {})
    (directory / "rootfs").mkdir()
    return Sandbox(state, str(directory))


def test_the_document() -> None:
    document = json.loads(json.dumps(runtime_config(PROCESS, "/r", hostname="box", read_only=True)))
    assert document["ociVersion"] == "1.0.2"
    assert document["root"] == {"path": "/r", "readonly": True}
    assert document["hostname"] == "box"
    process = document["process"]
    assert process["args"] == ["sh", "-c", "true"]
    assert process["user"] == {"uid": 0, "gid": 0, "additionalGids": [4, 5]}
    assert process["capabilities"]["effective"] == list(CAPABILITIES)
    assert {mount["destination"] for mount in document["mounts"]} == {
        "/proc",
        "/dev",
        "/dev/pts",
        "/dev/shm",
        "/dev/mqueue",
        "/sys",
    }
    assert {"type": "network"} not in document["linux"]["namespaces"]
    assert "/proc/kcore" in document["linux"]["maskedPaths"]
    assert "/proc/sys" in document["linux"]["readonlyPaths"]


def test_an_unprivileged_user_starts_without_capabilities() -> None:
    document = json.loads(json.dumps(runtime_config(replace(PROCESS, user=User(1000)), "/r", hostname="box")))
    capabilities = document["process"]["capabilities"]
    assert capabilities["effective"] == capabilities["permitted"] == []
    assert capabilities["bounding"] == list(CAPABILITIES)


def test_further_mounts_come_last() -> None:
    extra = {"destination": "/cache", "type": "bind", "source": "/c", "options": ["rbind"]}
    document = json.loads(json.dumps(runtime_config(PROCESS, "/r", hostname="box", mounts=[extra])))
    assert document["mounts"][-1] == extra


def test_a_bundle_is_written_once(tmp_path: Path) -> None:
    sandbox = sandbox_in(tmp_path, read_only=True)
    bundle = tmp_path / "bundle"
    path = write_bundle(str(bundle), sandbox, RunConfig(cmd=("/bin/é",)))
    assert [entry.name for entry in bundle.iterdir()] == ["config.json"]
    document = json.loads(Path(path).read_bytes())
    assert document["process"]["args"] == ["/bin/é"]
    assert document["root"] == {"path": sandbox.rootfs, "readonly": True}
    with pytest.raises(UsageError, match="exists"):
        write_bundle(str(bundle), sandbox, RunConfig(cmd=("other",)))
    assert json.loads(Path(path).read_bytes()) == document
    assert [entry.name for entry in bundle.iterdir()] == ["config.json"]


def test_a_bundle_without_a_command_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="command"):
        write_bundle(str(tmp_path / "bundle"), sandbox_in(tmp_path), RunConfig())
    assert not (tmp_path / "bundle").exists()
