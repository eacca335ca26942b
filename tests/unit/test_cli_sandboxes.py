"""The verbs for sandboxes and the node, before a service that keeps everything in memory."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.receipts import RECEIPT
from support.service import CHAIN, LAYER, FakeService, served
from support.tools import CHECKOUT

from imgtool import service_start
from imgtool.cli import run
from imgtool.commands import run as run_module
from imgtool.commands.trace_recording import start, stop
from imgtool.exitcodes import ExitCode
from layerstore.errors import ConflictError, MalformedError, NotFoundError, UnavailableError, UsageError
from layerstore.oci.config import RunConfig
from layerstore.progress import Progress
from overlay.execution import Outcome
from overlay.format import SandboxState, chain_of
from overlay.process import run_config, run_document
from overlay.sandbox import Sandbox, Sandboxes
from overlay.service import notify
from overlay.service.client import Client
from overlay.service.options import NodeOptions
from overlay.service.place import SOCKET
from overlay.service.receipt import Reason
from overlay.service.receipts import Receipts
from overlay.service.request import Record, SandboxRequest
from overlay.service.routes import Document

RUN = RunConfig(env=("A=1",), cmd=("/bin/sh",), labels=(("a", "b"),))


class Service(FakeService):
    """With what ``create`` adds for those who run something."""

    def create(self, request: SandboxRequest, progress: Progress) -> list[Document]:
        return [{**document, "run": run_document(RUN)} for document in super().create(request, progress)]

    def stop(self, force: bool) -> Document:
        return {**super().stop(force), "killed": [4711]}


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs verbs in this process, over a service if there is one."""

    def __init__(self, root: Path, capture: pytest.CaptureFixture[str], service: Service) -> None:
        self.root = root
        self.service = service
        self._capture = capture

    def __call__(self, *arguments: str) -> Result:
        self._capture.readouterr()
        code = run(arguments)
        out, err = self._capture.readouterr()
        return Result(int(code), out, err)

    def ok(self, *arguments: str) -> Result:
        result = self(*arguments)
        assert (result.code, result.err) == (0, "")
        return result

    def fails(self, code: ExitCode, *arguments: str) -> str:
        result = self(*arguments)
        assert (result.code, result.out) == (code, ""), result.err
        assert result.err.startswith("imgtool: ") and len(result.err.splitlines()) == 1
        return result.err[9:-1]

    @property
    def asked(self) -> SandboxRequest:
        """The last request to make something."""
        return [call[1] for call in self.service.calls if call[0] == "create"][-1]


@pytest.fixture
def idle(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A node whose service doesn't run, and can't be started."""
    monkeypatch.setenv("IMGTOOL_ROOT", str(tmp_path / "root"))
    monkeypatch.delenv("IMGTOOL_STORE", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    path = str(tmp_path / SOCKET)
    monkeypatch.setattr(service_start, "socket_path", lambda root: path)
    monkeypatch.setattr(service_start, "Client", lambda root: Client.at(path))
    monkeypatch.setattr(service_start, "_spawn", _must_not_start)
    return Shell(tmp_path / "root", capsys, Service(str(tmp_path / "root")))


def _must_not_start(root: str, log: int) -> subprocess.Popen[bytes]:
    pytest.fail("this starts a service")


@pytest.fixture
def node(idle: Shell, tmp_path: Path) -> Iterator[Shell]:
    """A node whose service runs."""
    with served(tmp_path, idle.service, users={os.getuid()}):
        yield idle


def state_of(root: Path, id: str, **fields: Any) -> None:
    """A sandbox as its state says it, without its mounts."""
    directory = root / "sandboxes" / id
    (directory / "rootfs").mkdir(parents=True)
    layers = ("a" * 64,)
    values: dict[str, Any] = {
        "id": id, "created": 1, "boot": "b", "mode": "lazy", "read_only": False, "scratch": None, "layers": layers,
        "chain": chain_of(layers), "image": {"name": "repo-env"}, "receipt": RECEIPT.to_json(),
    }  # fmt: skip
    (directory / "state.json").write_bytes(SandboxState(**{**values, **fields}).to_bytes())


# -- up ---------------------------------------------------------------------------------------------------------------


def test_up_prints_a_line_for_each_sandbox(node: Shell) -> None:
    assert node.ok("up", "repo-env", "--id", "box").out == f"box  {node.root}/sandboxes/box/rootfs\n"
    assert node.asked == SandboxRequest(base="repo-env", store=f"{node.root}/store", id="box")
    lines = node.ok("up", "repo-env", "--count", "3", "--id", "w").out.splitlines()
    assert [line.split()[0] for line in lines] == ["w-1", "w-2", "w-3"]
    assert "sandbox box exists" in node.fails(ExitCode.CONFLICT, "up", "repo-env", "--id", "box")


def test_up_in_json_has_what_a_script_needs(node: Shell) -> None:
    document = node.ok("up", "repo-env", "--json").json
    assert list(document) == [
        "id", "rootfs", "mode", "receipt", "image", "layers", "chain", "read_only", "scratch", "upper", "created",
        "mounted", "backend", "why", "condition", "demand", "trace", "prefetch", "bundle",
    ]  # fmt: skip
    assert (document["chain"], document["layers"], document["bundle"]) == (CHAIN, [LAYER], None)
    assert len(node.ok("up", "repo-env", "--count", "2", "--json").json) == 2


def test_up_passes_its_options_on(node: Shell, tmp_path: Path) -> None:
    arguments = ("--mode", "lazy", "--backend", "fuse", "--scratch", "1G", "--ttl", "1h30m", "--store", str(tmp_path))
    node.ok("up", "sha256:" + "d" * 64, *arguments)
    assert node.asked == SandboxRequest(
        base="sha256:" + "d" * 64, store=str(tmp_path), mode="lazy", backend="fuse", scratch=1 << 30, ttl=5400.0
    )
    node.ok("up", "repo-env", "--read-only", "--mode", "direct")
    assert (node.asked.read_only, node.asked.mode, node.asked.ttl) == (True, "direct", None)


def test_up_and_run_say_what_is_recorded_and_fetched_ahead(node: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    node.ok("up", "repo-env", "--id", "a", "--record")
    assert (node.asked.record, node.asked.plan, node.asked.wait_prefetch) == (Record(), "auto", False)
    assert node.ok("up", "repo-env", "--record", "--trace", "monday", "--json").json["trace"] == "monday"
    node.ok("up", "repo-env", "--plan", "tests", "--wait-prefetch")
    assert (node.asked.record, node.asked.plan, node.asked.wait_prefetch) == (None, "tests", True)
    monkeypatch.setattr(run_module, "run", lambda *arguments, **fields: Outcome(0, "chroot"))
    state_of(node.root, "000000000003")
    argv = ["sh", "-c", "", "x" * 5000, *["y"] * 2000]
    result = node("run", "--record", "--trace", "t", "--plan", "none", "repo-env", "--", *argv)
    assert result.err.splitlines()[-1] == f"imgtool: trace {node.root}/traces/t.jsonl, 689 accesses, 11 MB"
    assert node.asked.command == ("sh", "-c", " ", "x" * 4096, *["y"] * 1020)
    assert (node.asked.record, node.asked.plan) == (Record("t"), "none")
    state_of(node.root, "000000000004")
    kept = node("run", "--quiet", "--record", "--keep", "--json", "repo-env", "--", "true")
    assert (kept.err, kept.json["trace"]["accesses"], "000000000004" in node.service.made) == ("", 689, True)
    assert node.service.recorded.keys() == {"a", "000000000001"}
    for verb in ("up", "run"):
        assert "give both" in node.fails(ExitCode.USAGE, verb, "--trace", "x", "repo-env")
        assert "name of a plan" in node.fails(ExitCode.USAGE, verb, "--plan", "../x", "repo-env")


def test_what_up_imports_is_little() -> None:
    """Plans and traces are the service's business: a start would pay for them each time."""
    script = (
        "import sys; import imgtool.commands.up, imgtool.service_start; "
        "print([name for name in sys.modules if name.partition('.')[0] == 'prefetch'])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=CHECKOUT)
    assert ran.stdout == "[]\n"


def test_a_run_whose_trace_is_lost_says_so_and_ends_as_its_command(
    node: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(*arguments: object, **fields: object) -> Outcome:
        node.service.recorded.clear()
        return Outcome(3, "chroot")

    monkeypatch.setattr(run_module, "run", fake)
    state_of(node.root, "000000000001")
    result = node("run", "--quiet", "--record", "repo-env", "--", "false")
    assert (result.code, result.err) == (
        3,
        "imgtool: warning: what it read was not recorded; the service's log says why\n",
    )


@pytest.fixture
def trace(node: Shell) -> Callable[..., Any]:
    """The verbs of ``trace`` that this file is about, whoever else is in that group."""

    def call(*arguments: str) -> Any:
        command = {"start": start, "stop": stop}[arguments[0]]
        return command.main(list(arguments[1:]), standalone_mode=False)

    return call


def test_a_trace_is_started_and_stopped(
    node: Shell, trace: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    node.ok("up", "repo-env", "--id", "box")
    trace("start", "box", "--name", "monday")
    assert capsys.readouterr().out == f"box  {node.root}/traces/monday.jsonl.part\n"
    assert node.service.calls[-1] == ("start_trace", "box", "monday")
    assert "recording  box (events)" in node.ok("node", "status").out
    with pytest.raises(ConflictError, match="is being recorded"):
        trace("start", "box", "--json")
    trace("stop", "box")
    assert capsys.readouterr().out == f"{node.root}/traces/monday.jsonl  689 accesses, 11 MB\n"
    with pytest.raises(NotFoundError, match="not being recorded"):
        trace("stop", "box")
    trace("start", "box", "--json")
    assert json.loads(capsys.readouterr().out)["name"] == "box"
    trace("stop", "box", "--json")
    assert json.loads(capsys.readouterr().out)["complete"] is True
    for arguments in (("start", "../x"), ("start", "box", "--name", "../x"), ("stop", "../x")):
        with pytest.raises(UsageError):
            trace(*arguments)


def test_up_by_description(node: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sandbox.yaml"
    path.write_text("image: {base: debian, toolkit: tools}\nmode: eager\nresources: {cpu: 2, scratch_gib: 1}\nnet: x\n")
    result = node("up", "-f", str(path))
    assert result.code == 0
    assert result.err == (
        f"imgtool: warning: {path}: not imgtool's, only carried into the receipt: net, resources.cpu\n"
    )
    store = f"{node.root}/store"
    carried = {"net": "x", "resources": {"cpu": 2}}
    asked = SandboxRequest(
        base="debian", toolkits=("tools",), store=store, mode="eager", scratch=1 << 30, carried=carried
    )
    assert node.asked == asked
    node("up", "-f", str(path), "--mode", "lazy", "--count", "2", "--store", "/other", "--id", "b")
    assert (node.asked.mode, node.asked.count, node.asked.store, node.asked.id) == ("lazy", 2, "/other", "b")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"image": "a", "store": "/s"}')))
    node.ok("up", "-f", "-")
    assert (node.asked.base, node.asked.store) == ("a", "/s")


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (ExitCode.USAGE, "image: {bse: a}", "image lacks the field 'base'"),
        (ExitCode.MALFORMED, "image: [", "not YAML"),
        (ExitCode.UNSUPPORTED, "image: a\nisolation: microvm", "isolation microvm"),
        (ExitCode.LIMIT, "#" * (1 << 20) + "#", "limit of 1048576 bytes"),
        (ExitCode.USAGE, "image: a\nresources: {read_only: true, scratch_gib: 1}", "no scratch to bound"),
    ],
)
def test_a_description_that_can_not_be_followed(
    idle: Shell, tmp_path: Path, code: ExitCode, text: str, said: str
) -> None:
    path = tmp_path / "sandbox.yaml"
    path.write_text(text)
    message = idle.fails(code, "up", "-f", str(path))
    assert message.startswith(str(path)) and said in message


def test_up_refuses_what_contradicts_itself_before_it_starts_anything(idle: Shell, tmp_path: Path) -> None:
    bundle = str(tmp_path / "bundle")
    for arguments, said in (
        ((), "name an image, or give a description"),
        (("a", "-f", "x"), "name an image, or give a description"),
        (("a", "--mode", "eager", "--backend", "fuse"), "mode eager has no backend"),
        (("a", "--read-only", "--scratch", "1G"), "no scratch to bound"),
        (("a", "--bundle", bundle, "--count", "2"), "--bundle is for one sandbox"),
        (("a", "--ttl", "soon"), "'soon' is not a span of time"),
        (("a", "--id", "../x"), "not a sandbox id"),
        (("a", "--count", "0"), "--count"),
    ):
        assert said in idle.fails(ExitCode.USAGE, "up", *arguments)
    assert "nowhere" in idle.fails(ExitCode.NOT_FOUND, "up", "-f", "nowhere")


def test_a_bundle_that_can_not_be_written_takes_its_sandbox_with_it(node: Shell, tmp_path: Path) -> None:
    state_of(node.root, "box", mode="eager")
    for name in ("etc", "bin"):
        (node.root / "sandboxes/box/rootfs" / name).mkdir()
    bundle = tmp_path / "bundle"
    node.ok("up", "repo-env", "--id", "box", "--bundle", str(bundle))
    config = json.loads((bundle / "config.json").read_text())
    assert (config["process"]["args"], config["hostname"]) == (["/bin/sh"], "box")
    del node.service.made["box"]
    assert "exists" in node.fails(ExitCode.USAGE, "up", "repo-env", "--id", "box", "--bundle", str(bundle))
    assert node.service.calls[-1] == ("remove", ["box"])
    assert node.service.made == {}


# -- run --------------------------------------------------------------------------------------------------------------


def test_run_makes_a_sandbox_runs_here_and_removes_it(node: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fake(sandbox: Sandbox, argv: Sequence[str] | None, config: RunConfig, **fields: object) -> Outcome:
        ran.append((sandbox.id, argv, config, fields, sorted(node.service.made)))
        return Outcome(7, "/usr/bin/runc")

    monkeypatch.setattr(run_module, "run", fake)
    state_of(node.root, "000000000001")
    result = node("run", "--mode", "lazy", "--scratch", "1G", "repo-env", "--", "pytest", "-q")
    assert (result.code, result.out) == (7, "")
    assert result.err == "imgtool: sandbox 000000000001\nimgtool: ran in /usr/bin/runc, exit code 7\n"
    fields = {"runtime": None, "terminal": False}
    assert ran == [("000000000001", ["pytest", "-q"], RUN, fields, ["000000000001"])]
    assert (node.asked.mode, node.asked.scratch) == ("lazy", 1 << 30)
    assert node.service.made == {}
    state_of(node.root, "000000000002")
    kept = node("run", "--quiet", "--keep", "--json", "repo-env")
    assert (kept.code, kept.err, list(node.service.made)) == (7, "", ["000000000002"])
    assert list(kept.json)[-3:] == ["runtime", "exit_code", "kept"] and "run" not in kept.json
    assert kept.json["trace"] is None


def test_run_that_can_not_remove_its_sandbox_says_so(node: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*arguments: object, **fields: object) -> Outcome:
        node.service.error = UnavailableError("it is busy")
        return Outcome(0, "chroot")

    monkeypatch.setattr(run_module, "run", fake)
    state_of(node.root, "000000000001")
    result = node("run", "--quiet", "repo-env", "--", "true")
    assert result.code == 0
    assert result.err == (
        "imgtool: warning: sandbox 000000000001 is still there: it is busy; "
        "`imgtool down 000000000001` removes it\n"
    )  # fmt: skip


def test_run_that_does_not_start_leaves_no_sandbox(node: Shell) -> None:
    """Its state isn't there: as when somebody removed the sandbox at once."""
    assert "no sandbox" in node.fails(ExitCode.RUN_FAILED, "run", "--quiet", "repo-env", "--", "true")
    assert node.service.made == {}
    node.service.error = UnavailableError("the store is away")
    assert node.fails(ExitCode.RUN_FAILED, "run", "repo-env") == "the store is away"


def test_how_an_image_is_run_travels_as_json() -> None:
    for config in (RunConfig(), RUN, RunConfig(entrypoint=(), volumes=("/v",), user="a:b", stop_signal="TERM")):
        assert run_config(json.loads(json.dumps(run_document(config)))) == config


@pytest.mark.parametrize(
    "change",
    [{"env": None}, {"env": "A=1"}, {"cmd": [1]}, {"user": None}, {"labels": [["a"]]}, {"labels": {}}, {"more": 1}],
)
def test_what_is_no_description_of_how_to_run_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedError, match="run settings of an image"):
        run_config({**run_document(RUN), **change})
    for document in (None, [], {}):
        with pytest.raises(MalformedError, match="run settings of an image"):
            run_config(document)


# -- ps ---------------------------------------------------------------------------------------------------------------


def test_ps_shows_how_a_cold_start_goes(node: Shell) -> None:
    node.ok("up", "repo-env", "--id", "box", "--read-only")
    node.ok("up", "repo-env", "--id", "other")
    node.service.made["box"]["demand"] = {"frames": 9, "bytes": 2_300_000, "waited": 0.4567, "events": 11, "failed": 0}
    node.service.made["other"] |= {"condition": "suspect: nobody answered from 10:00 to 10:01", "prefetch": None}
    lines = node.ok("ps").out.splitlines()
    assert lines[0].split() == [
        "ID",
        "IMAGE",
        "MODE",
        "BACKEND",
        "STATE",
        "AGE",
        "LATE",
        "WAITED",
        "PREFETCH",
        "ROOTFS",
    ]
    assert re.fullmatch(
        r"box +repo-env +lazy ro +fanotify +up +\S+ +2.3 MB +0.457 s +190/200, 96 % used +/.*/box/rootfs",
        lines[1].rstrip(),
    )
    assert re.fullmatch(r"other +repo-env +lazy +fanotify +suspect +\S+ +- +- +- +/.*/other/rootfs", lines[2].rstrip())
    assert lines[3:] == ["other: suspect: nobody answered from 10:00 to 10:01"]
    wide = node.ok("ps", "--wide").out.splitlines()
    assert wide[0].split()[-1] == "WHY"
    assert wide[1].rstrip().endswith("the kernel has pre-content events")
    listed = node.ok("ps", "--json").json
    assert [item["id"] for item in listed] == ["box", "other"]
    assert set(listed[0]) == set(node.ok("up", "repo-env", "--json").json) - {"bundle"}


def test_ps_without_a_service_starts_none(idle: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle.ok("ps", "--json").json == []
    state_of(idle.root, "gone")
    state_of(idle.root, "held")
    state_of(idle.root, "whole", mode="eager", receipt={})
    monkeypatch.setattr(Sandbox, "stands", property(lambda sandbox: sandbox.id != "gone"))
    (idle.root / "cache").mkdir()
    (idle.root / "cache/clean").touch()
    assert [item["condition"] for item in idle.ok("ps", "--json").json] == ["not mounted", "ok", "ok"]
    (idle.root / "cache/clean").unlink()
    listed = {item["id"]: item for item in idle.ok("ps", "--json").json}
    assert {id: item["condition"].partition(":")[0] for id, item in listed.items()} == {
        "gone": "not mounted",
        "held": "not served",
        "whole": "ok",
    }
    assert (listed["held"]["backend"], listed["held"]["why"]) == ("fanotify", "the kernel has pre-content events")
    assert (listed["whole"]["backend"], listed["whole"]["demand"]) == ("files", None)
    lines = idle.ok("ps").out.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", "gone", "held", "whole", "held:"]
    assert "`imgtool node run`" in lines[4]


# -- down -------------------------------------------------------------------------------------------------------------


def test_down_goes_through_the_service(node: Shell) -> None:
    node.ok("up", "repo-env", "--id", "box", "--count", "3")
    assert node.ok("down", "box-1", "gone").out == "box-1 removed\ngone was gone already\n"
    document = node.ok("down", "--all", "--json").json
    assert document["removed"] == [
        {"id": "box-2", "existed": True, "stopped": [], "trace": None},
        {"id": "box-3", "existed": True, "stopped": [], "trace": None},
    ]
    node.ok("up", "repo-env", "--id", "r", "--record")
    assert node.ok("down", "r").out == f"r removed, trace {node.root}/traces/r.jsonl\n"
    assert [list(item) for item in document["leftovers"]] == [["kind", "path", "action"]]
    assert node.ok("down", "--leftovers").out == f"part of a sandbox {node.root}/sandboxes/lost: removed\n"
    assert "not a sandbox id" in node.fails(ExitCode.USAGE, "down", "../etc")


def test_down_without_anything_to_remove_starts_no_service(idle: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    recovered = []
    monkeypatch.setattr(Sandboxes, "recover", lambda sandboxes: recovered.append(sandboxes.root) or [])
    assert idle.ok("down", "box").out == "box was gone already\n"
    assert recovered == []
    assert idle.ok("down", "--all", "--json").json == {"removed": [], "leftovers": []}
    assert idle.ok("down", "--leftovers").out == "no leftovers\n"
    assert recovered == [str(idle.root)] * 2
    assert not (idle.root / "node.log").exists()


def test_down_starts_a_service_where_there_is_something(idle: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def fake(root: str) -> Client:
        started.append(root)
        raise UnavailableError("this test starts none")

    monkeypatch.setattr(service_start, "service", fake)
    state_of(idle.root, "box")
    for arguments in (("box",), ("--all",), ("--leftovers",)):
        idle.fails(ExitCode.UNAVAILABLE, "down", *arguments)
    assert started == [str(idle.root)] * 3
    idle.ok("down", "other")


# -- node -------------------------------------------------------------------------------------------------------------


def test_node_status(node: Shell) -> None:
    node.ok("up", "repo-env")
    lines = dict(line.split("  ", 1) for line in map(str.strip, node.ok("node", "status").out.splitlines()))
    assert lines["service"] == "imgtool 0.1.0, up 86s"
    assert lines["processes"] == "holder 811, keeper 812, worker 813"
    assert lines["backend"] == "fanotify: the kernel has pre-content events"
    assert lines["cache"] == "1.45 GB, limit 20 GB, 12 packs; in use 900 MB, pinned 450 MB"
    assert lines["sandboxes"] == "1: 1 lazy, 1 ok"
    assert (
        lines["fetched"]
        == "1 kB in 4 requests for readers, 9 kB in 2 requests ahead; 3 reads waited 0.07 s, all together"
    )
    assert lines["fetching"] == "1 requests under way, 1 readers wait"
    assert lines["reads asked"].startswith("25 events, 24 allowed")
    document = node.ok("node", "status", "--json").json
    assert document["pids"]["keeper"] == 812 and document["socket"].endswith("/node.sock")


def test_what_is_asked_of_a_service_that_does_not_run(idle: Shell) -> None:
    for verb in ("status", "metrics"):
        assert "no node service of" in idle.fails(ExitCode.NOT_FOUND, "node", verb)
    assert idle.ok("node", "stop").out == f"no node service of {idle.root} was running\n"
    assert idle.ok("node", "stop", "--json").json == {"stopped": False, "killed": []}


def test_node_stop(node: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_start, "PATIENCE", 0.2)  # this one's socket stays
    node.ok("up", "repo-env", "--id", "box")
    assert "sandboxes are in use: box" in node.fails(ExitCode.CONFLICT, "node", "stop")
    assert node.ok("node", "stop", "--force").out == "stopped; killed 4711\n"
    assert [call for call in node.service.calls if call[0] == "stop"] == [("stop", False), ("stop", True)]


def test_node_pins(node: Shell) -> None:
    assert node.ok("node", "pin", "team/repo:1").out == "team/repo:1: 1 pack(s) and metadata image(s) are kept\n"
    assert ("pin", "team/repo:1", f"{node.root}/store") in node.service.calls
    assert node.ok("node", "pins", "--json").json == [{"name": "team/repo:1", "content": [LAYER[7:]]}]
    assert node.ok("node", "pins").out.split() == ["NAME", "CONTENT", "team/repo:1", "1"]
    assert node.ok("node", "unpin", "team/repo:1").out == "team/repo:1 is not kept any more\n"
    node.fails(ExitCode.NOT_FOUND, "node", "unpin", "team/repo:1")


def test_node_evict_and_metrics(node: Shell) -> None:
    assert node.ok("node", "evict", "1M").out == "freed 1.05 MB\n"
    assert node.ok("node", "evict", "10G", "--json").json == {"freed": 100_000_000}
    assert node.ok("node", "metrics").out.endswith("imgtool_sandboxes 0.0\n")
    node.fails(ExitCode.USAGE, "node", "evict", "lots")


def test_node_receipt_with_and_without_a_service(node: Shell) -> None:
    node.ok("up", "repo-env", "--id", "box")
    assert node.ok("node", "receipt", "box").json["id"] == "box"
    assert "no receipt of nobody" in node.fails(ExitCode.NOT_FOUND, "node", "receipt", "nobody")


def test_receipts_outlive_the_service(idle: Shell) -> None:
    state_of(idle.root, "box")
    Receipts(str(idle.root)).keep(RECEIPT.ending(Reason.DOWN))
    assert idle.ok("node", "receipt", "box").json == RECEIPT.to_json(), "that of the one that stands"
    (idle.root / "sandboxes/box/state.json").unlink()
    assert idle.ok("node", "receipt", "box").json["end"]["reason"] == "down"
    assert "kept for 7 days" in idle.fails(ExitCode.NOT_FOUND, "node", "receipt", "other")


def test_node_run_hands_its_options_over(idle: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, NodeOptions]] = []
    module = ModuleType("overlay.service.start")
    monkeypatch.setattr(module, "run", lambda root, options: ran.append((root, options)), raising=False)
    monkeypatch.setitem(sys.modules, "overlay.service.start", module)
    idle.ok("node", "run")
    assert ran.pop() == (str(idle.root), NodeOptions())
    for name, value in (
        ("NOTIFY_SOCKET", "/run/systemd/notify"),
        ("WATCHDOG_USEC", "2500000"),
        ("LISTEN_PID", str(os.getpid())),
        ("LISTEN_FDS", "2"),
        ("LISTEN_FDNAMES", "group.0:group.1"),
    ):
        monkeypatch.setenv(name, value)
    # What descriptors 3 and 4 are is test_service_notify.py's: here they are the test runner's own.
    monkeypatch.setattr(notify, "stored", lambda *values: (("group", 3), ("group", 4)) if values[1] == "2" else ())
    arguments = (
        "--prefetch-bandwidth",
        "20M",
        "--limit",
        "10G",
        "--read-deadline",
        "5",
        "--threads",
        "4",
        "--log",
        "/l",
        "--log-format",
        "text",
    )
    idle.ok("node", "run", *arguments, "--idle-exit", "300")
    assert ran.pop()[1] == NodeOptions(
        prefetch_bandwidth=20 << 20,
        limit=10 << 30,
        read_deadline=5.0,
        threads=4,
        log="/l",
        log_format="text",
        idle_exit=300.0,
        notify_socket="/run/systemd/notify",
        watchdog=2.5,
        listen_fds=(("group", 3), ("group", 4)),
    )
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    idle.ok("node", "run")
    assert (ran[-1][1].listen_fds, ran[-1][1].watchdog) == ((), None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    idle.fails(ExitCode.PERMISSION, "node", "run")


# -- starting one -----------------------------------------------------------------------------------------------------

LISTENS = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    listening.listen()
    print("listening", flush=True)
    sys.stdin.read()
"""


class Starter:
    """In place of the service: a program that listens until it is told to end, or whatever else."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.program = LISTENS
        self.children: list[subprocess.Popen[bytes]] = []

    def __call__(self, root: str, log: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", self.program, self.path]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self.children.append(child)
        return child

    def end(self) -> None:
        for child in self.children:
            assert child.stdin is not None
            child.stdin.close()
            if not child.returncode:  # 0 is what those are given that are left alone
                child.returncode = None
                child.wait()


@pytest.fixture
def starter(idle: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    starter = Starter(str(tmp_path / SOCKET))
    monkeypatch.setattr(service_start, "_spawn", starter)
    yield starter
    starter.end()


def test_a_service_is_started_once_however_many_want_it(idle: Shell, starter: Starter) -> None:
    got: list[Client] = []
    threads = [threading.Thread(target=lambda: got.append(service_start.service(str(idle.root)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 8
    assert len(starter.children) == 1
    assert service_start.is_running(str(idle.root))
    assert os.stat(idle.root).st_mode & 0o777 == 0o700


def test_a_service_that_ends_is_reported_with_the_last_line_of_its_log(idle: Shell, starter: Starter) -> None:
    idle.root.mkdir()
    (idle.root / "node.log").write_text("of another time\n")
    starter.program = "import sys; print('one'); print('imgtool: no \\x1b disk\\n'); sys.exit(10)"
    message = idle.fails(ExitCode.UNAVAILABLE, "up", "repo-env")
    path = f"{idle.root}/node.log"
    assert message == rf"the node service ended with code 10: imgtool: no \x1b disk (more in {path})"
    starter.program = "import sys; sys.exit(1)"
    assert "ended with code 1: it wrote nothing" in idle.fails(ExitCode.UNAVAILABLE, "node", "pins")


def test_a_service_that_does_not_answer_in_time(idle: Shell, starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_start, "PATIENCE", 0.3)
    starter.program = "import sys; print('still reading', flush=True); sys.stdin.read()"
    assert "does not answer" in idle.fails(ExitCode.UNAVAILABLE, "node", "pins")
    assert starter.children[0].returncode == -signal.SIGTERM


def test_a_service_that_loses_to_another_waits_for_it(idle: Shell, starter: Starter) -> None:
    """The other one has the lock, and listens a little later."""
    other = Starter(starter.path)
    starter.program = "import sys; sys.exit(7)"

    def come_later() -> None:
        until = time.monotonic() + 10
        while len(starter.children) < 2:
            assert time.monotonic() < until
        other(str(idle.root), 2)

    thread = threading.Thread(target=come_later)
    thread.start()
    try:
        service_start.service(str(idle.root)).close()
        assert service_start.is_running(str(idle.root))
    finally:
        thread.join()
        other.end()


def test_a_lock_that_is_never_free(idle: Shell, starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_start, "PATIENCE", 0.5)
    starter.program = "import sys; print('imgtool: it runs already'); sys.exit(7)"
    assert "imgtool: it runs already" in idle.fails(ExitCode.UNAVAILABLE, "node", "pins")


def test_a_log_that_has_grown_is_put_aside(idle: Shell, starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_start, "MAX_LOG", 10)
    idle.root.mkdir()
    (idle.root / "node.log").write_text("long ago, far away\n")
    service_start.service(str(idle.root)).close()
    assert (idle.root / "node.log.1").read_text() == "long ago, far away\n"
    assert (idle.root / "node.log").read_text() in ("", "listening\n")


def test_only_root_starts_a_service(idle: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for arguments in (("up", "a"), ("down", "a"), ("node", "pins"), ("node", "stop")):
        assert "needs root" in idle.fails(ExitCode.PERMISSION, *arguments)
    assert "needs root" in idle.fails(ExitCode.RUN_FAILED, "run", "a")
