"""The rival's arm: a registry, and containerd with a root of its own. Programs are those of ``scripts/setup bench``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from benchmarks.fileserver import await_listener, free_address
from benchmarks.harness import TOP, tool
from overlay import mountinfo
from overlay.mountapi import MNT_DETACH, umount

SNAPSHOTTER = "overlayfs"
_NAMESPACE = (("containerd-namespace", "default"),)
_GC_ROOT = {"containerd.io/gc.root": "1970-01-01T00:00:00Z"}
"""Without it, or a container that refers to a snapshot, containerd removes it as garbage."""
_SERVICE = "/containerd.services.snapshots.v1.Snapshots/"
_CONFIGURATION = """version = 3
root = "{work}/root"
state = "{run}"
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
  "io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{run}/containerd.sock"
[debug]
  level = "warn"
"""
_REGISTRY = {"version": "0.1", "log": {"level": "error", "accesslog": {"disabled": True}}}


def lacking() -> str | None:
    """Why the rival can't be run here; None: it can."""
    missing = [name for name in ("containerd", "ctr", "docker-registry", "runc", "skopeo") if tool(name) is None]
    return f"no {', '.join(missing)} here: scripts/setup bench" if missing else None


@contextlib.contextmanager
def registry(directory: Path) -> Iterator[str]:
    """``HOST:PORT`` of a registry that keeps its content in ``directory``, for as long as the block runs."""
    directory.mkdir(parents=True, exist_ok=True)
    address = free_address()
    storage = {"filesystem": {"rootdirectory": str(directory)}, "cache": {"blobdescriptor": "inmemory"}}
    configuration = directory.with_name(directory.name + ".json")  # JSON is YAML
    configuration.write_text(json.dumps({**_REGISTRY, "storage": storage, "http": {"addr": address}}))
    process = subprocess.Popen([_program("docker-registry"), "serve", str(configuration)], stderr=subprocess.DEVNULL)
    try:
        await_listener(address, process)
        yield address
    finally:
        process.terminate()
        process.wait()


def push(layout: Path, tag: str, address: str) -> str:
    """Copy an image of an OCI layout to a registry as it is; its reference there without the registry."""
    reference = f"{layout.name}:{tag}"
    command = [_program("skopeo"), "copy", "-q", "--dest-tls-verify=false", f"oci:{layout}:{tag}"]
    subprocess.run([*command, f"docker://{address}/{reference}"], check=True)
    return reference


class Containerd:
    """containerd with an empty root. A context manager: it starts it, and leaves nothing."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._stack = contextlib.ExitStack()
        self._socket = ""

    def __enter__(self) -> Self:
        with self._stack as stack:
            self.work.mkdir(parents=True, exist_ok=True)
            # A socket's path has 107 bytes, and containerd makes a second one beside it.
            run = stack.enter_context(tempfile.TemporaryDirectory(dir="/run", prefix="imgtool-bench-"))
            self._socket = f"{run}/containerd.sock"
            configuration = self.work / "config.toml"
            configuration.write_text(_CONFIGURATION.format(work=self.work, run=run))
            log = stack.enter_context((self.work / "log").open("wb"))
            environment = {
                **os.environ,
                "PATH": f"{TOP}/.tools/bin:{os.environ['PATH']}",
            }  # it looks there for its shim
            process = subprocess.Popen([_program("containerd"), "-c", str(configuration)], stderr=log, env=environment)
            stack.callback(self._end, process)
            for _ in range(500):
                if process.poll() is not None:
                    raise SystemExit((self.work / "log").read_text()[-500:])
                if subprocess.run(self.ctr("version"), capture_output=True).returncode == 0:
                    break
                time.sleep(0.02)
            else:
                raise SystemExit("containerd does not answer")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait()
        for place in (os.path.realpath(self.work), os.path.dirname(self._socket)):
            for mount in mountinfo.below(place, mountinfo.read()):
                umount(mount.target, MNT_DETACH)

    def ctr(self, *arguments: str) -> list[str]:
        """A command line."""
        return [_program("ctr"), "--address", self._socket, *arguments]

    def pull(self, reference: str) -> list[str]:
        """The command line that fetches ``reference`` and unpacks it."""
        return self.ctr("images", "pull", "--plain-http", "--snapshotter", SNAPSHOTTER, reference)

    def run(self, reference: str, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` in a container of ``reference``."""
        return self.ctr("run", "--rm", "--snapshotter", SNAPSHOTTER, reference, name, *argv)

    def top(self) -> str:
        """The name of the snapshot that an image's containers are made from: the one that has no children."""
        listed = subprocess.run(
            self.ctr("snapshots", "--snapshotter", SNAPSHOTTER, "ls"), check=True, capture_output=True, text=True
        ).stdout.splitlines()[1:]
        keys = {line.split()[0] for line in listed}
        parents = {line.split()[1] for line in listed if len(line.split()) == 3}
        [top] = keys - parents
        return top

    def snapshots(self) -> Snapshots:
        return Snapshots(f"unix:{self._socket}")


class Snapshots:
    """containerd's snapshots API over one connection: :meth:`prepare` and :meth:`remove`, for any thread.

    Their few messages are written here by hand; the Python packages that have them need a protobuf of 2021.
    """

    def __init__(self, address: str) -> None:
        try:
            import grpc
        except ImportError:
            raise SystemExit("no grpcio here: scripts/setup bench") from None
        self._channel = grpc.insecure_channel(address)
        self._prepare = self._channel.unary_unary(_SERVICE + "Prepare")
        self._remove = self._channel.unary_unary(_SERVICE + "Remove")

    def close(self) -> None:
        self._channel.close()

    def prepare(self, key: str, parent: str) -> tuple[str, str, str]:
        """Make a writable snapshot; type, source and options of the mount that shows it."""
        request = _field(1, SNAPSHOTTER) + _field(2, key) + _field(3, parent)
        for name, value in _GC_ROOT.items():
            request += _field(4, _field(1, name) + _field(2, value))
        [(_, mount)] = _fields(self._prepare(request, metadata=_NAMESPACE))
        fields = _fields(mount)
        kind, source = (next((value for number, value in fields if number == wanted), b"") for wanted in (1, 2))
        options = b",".join(value for number, value in fields if number == 4)
        return kind.decode(), source.decode(), options.decode()

    def remove(self, key: str) -> None:
        self._remove(_field(1, SNAPSHOTTER) + _field(2, key), metadata=_NAMESPACE)


def _field(number: int, value: str | bytes) -> bytes:
    """A length-delimited protobuf field."""
    data = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _fields(message: bytes) -> list[tuple[int, bytes]]:
    """The fields of a message in which all are length-delimited."""
    found, at = [], 0
    while at < len(message):
        tag, at = message[at], at + 1
        assert tag & 7 == 2, "a field that snapshots don't have"
        length = shift = 0
        while True:
            byte, at = message[at], at + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found.append((tag >> 3, message[at : at + length]))
        at += length
    return found


def _program(name: str) -> str:
    found = tool(name)
    if found is None:
        raise SystemExit(f"{name} is not there: scripts/setup bench")
    return found
