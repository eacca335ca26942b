"""Others who read what is exported: a registry, and containerd with a root of its own. Nothing of them stays.

The registry is docker-registry of ``.tools/bin``, containerd is 2.1 or later; with the EROFS snapshotter and differ as
docs/cli.md says to configure them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from layerstore.export.flat import write_flat
from layerstore.export.gather import Gatherer, Piece
from layerstore.export.tarlayer import write_tar
from layerstore.image import Layer
from layerstore.limits import DEFAULT_LIMITS
from layerstore.oci.platform import host
from layerstore.opened import open_layer
from layerstore.progress import SILENT
from layerstore.store.protocol import Store
from layerstore.tar.reader import MemberReader
from layerstore.tree.inode import Directory
from layerstore.tree.merge import Merge
from support.erofs_images import Packs
from support.tools import PRIVATE_TOOLS, lacking, need_root, need_tool
from support.trees import Bytes

Json = dict[str, Any]

_DEADLINE = 30.0
_SHARED = Path("/run/containerd")
_CONTAINERD = """version = 3
root = "{work}/root"
state = "{run}/state"
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
  "io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{run}/containerd.sock"
[debug]
  level = "info"
[plugins."io.containerd.service.v1.diff-service"]
  default = ["erofs", "walking"]
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "{platform}"
  snapshotter = "erofs"
  differ = "erofs"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "{platform}"
  snapshotter = "overlayfs"
  differ = "walking"
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def registry(directory: Path) -> Iterator[str]:
    """``HOST:PORT`` of an empty registry that keeps its content in ``directory``."""
    program = need_tool("docker-registry")
    directory.mkdir(parents=True)
    address = f"127.0.0.1:{free_port()}"
    configuration = directory / "config.yml"  # JSON is YAML
    configuration.write_text(
        json.dumps(
            {
                "version": "0.1",
                "log": {"level": "error", "accesslog": {"disabled": True}},
                "storage": {"filesystem": {"rootdirectory": str(directory / "root")}},
                "http": {"addr": address},
            }
        )
    )
    with (directory / "log").open("wb") as log, _running([program, "serve", str(configuration)], log) as process:
        host, _, port = address.partition(":")
        _wait(process, lambda: _answers(host, int(port)), directory / "log")
        yield address


def push(layout: Path, tag: str, reference: str) -> None:
    """Copy an image of a layout into a registry, its blobs as they are."""
    skopeo = need_tool("skopeo")
    command = [skopeo, "copy", "-q", "--preserve-digests", "--dest-tls-verify=false"]
    _ran([*command, f"oci:{layout}:{tag}", f"docker://{reference}"])


class Containerd:
    """A running containerd. ``snapshotter`` is overlayfs or erofs."""

    def __init__(self, program: str, address: str, work: Path) -> None:
        self._ctr = [program, "--address", address]
        self.root = work / "root"
        self.log = work / "log"

    def ctr(self, *arguments: str, check: bool = True) -> str:
        """What a call of ctr prints."""
        ran = subprocess.run(
            [*self._ctr, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=120,
        )
        if check and ran.returncode:
            log = self.log.read_text(errors="replace")[-2000:]
            raise AssertionError(f"ctr {' '.join(arguments)}: {ran.stderr.strip()}\n{log}")
        return ran.stdout

    def pull(self, reference: str, snapshotter: str) -> None:
        self.ctr("images", "pull", "--plain-http", "--snapshotter", snapshotter, reference)

    def digest(self, reference: str) -> str:
        """Of the manifest that a reference stands for here."""
        [found] = [
            line.split()[2] for line in self.ctr("images", "ls").splitlines() if line.startswith(reference + " ")
        ]
        return found

    def run(self, reference: str, name: str, snapshotter: str, *argv: str) -> str:
        """What ``argv`` prints in a container of an image."""
        return self.ctr("run", "--rm", "--snapshotter", snapshotter, reference, name, *argv)

    @contextmanager
    def rootfs(self, reference: str, name: str, snapshotter: str) -> Iterator[Path]:
        """A container's root file system, mounted by containerd and kept by a container that sleeps."""
        self.ctr("run", "-d", "--snapshotter", snapshotter, reference, name, "/bin/sleep", "1000")
        try:
            task = next(line.split() for line in self.ctr("tasks", "ls").splitlines() if line.startswith(name))
            yield Path(f"/proc/{task[1]}/root")
        finally:
            self.ctr("tasks", "kill", "-s", "SIGKILL", name, check=False)
            self.ctr("tasks", "delete", "-f", name, check=False)
            self.ctr("containers", "delete", name, check=False)


@contextmanager
def containerd(work: Path) -> Iterator[Containerd]:
    """containerd below ``work``, which must not be on overlayfs; its mounts and processes end with the block."""
    need_root()
    program, ctr = need_tool("containerd", "2.1"), need_tool("ctr")
    need_tool("runc")
    if "erofs" not in Path("/proc/filesystems").read_text():
        lacking("this kernel has no EROFS")
    with ExitStack() as stack:
        work.mkdir(parents=True)
        stack.callback(shutil.rmtree, work)
        if not _SHARED.exists():  # where shims have their sockets, whatever the configuration says
            stack.callback(shutil.rmtree, _SHARED, ignore_errors=True)
        # The path of a socket has at most 107 bytes.
        run = stack.enter_context(tempfile.TemporaryDirectory(dir="/run", prefix="imgtool-test-"))
        configuration = work / "config.toml"
        configuration.write_text(_CONTAINERD.format(work=work, run=run, platform=f"linux/{host().architecture}"))
        log = stack.enter_context((work / "log").open("wb"))
        address = f"{run}/containerd.sock"
        environment = {**os.environ, "PATH": f"{PRIVATE_TOOLS}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        stack.callback(_unmount_below, work, Path(run))
        process = stack.enter_context(_running([program, "-c", str(configuration)], log, environment))
        stack.callback(_kill_shims, address)
        server = Containerd(ctr, address, work)
        _wait(process, lambda: _ctr_answers(ctr, address), work / "log")
        yield server


@contextmanager
def _running(
    command: list[str], log: Any, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kill_shims(address: str) -> None:
    """End the shims of one containerd, which outlive it by design: those that were started with its address."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if b"shim" in arguments[0] and address.encode() in arguments:
                    os.kill(int(entry.name), 9)


def _unmount_below(*places: Path) -> None:
    roots = tuple(f"{os.path.realpath(place)}/" for place in places)
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for target in reversed(mounts):
        if target.startswith(roots):
            _ran(["umount", "-l", target])


def _wait(process: subprocess.Popen[bytes], ready: Any, log: Path) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{process.args!r} doesn't answer: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def _ctr_answers(ctr: str, address: str) -> bool:
    ran = subprocess.run([ctr, "--address", address, "version"], stdin=subprocess.DEVNULL, capture_output=True)
    return ran.returncode == 0


def _ran(command: list[str]) -> None:
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, f"{command}: {ran.stderr}"


# ---- layouts


def blob(layout: Path, digest: str) -> Path:
    algorithm, _, value = digest.partition(":")
    return layout / "blobs" / algorithm / value


def entry(layout: Path, tag: str) -> Json:
    """The one entry of an index with this tag."""
    index = json.loads((layout / "index.json").read_bytes())
    name = "org.opencontainers.image.ref.name"
    [found] = [entry for entry in index["manifests"] if entry.get("annotations", {}).get(name) == tag]
    return dict(found)


def documents(layout: Path, tag: str) -> tuple[Json, Json]:
    """Manifest and config of a tag."""
    manifest = json.loads(blob(layout, entry(layout, tag)["digest"]).read_bytes())
    return manifest, json.loads(blob(layout, manifest["config"]["digest"]).read_bytes())


def listing(root: Path) -> list[tuple[object, ...]]:
    """Every path of a mount with all that lstat and its xattrs tell; inode numbers only as link sets.

    What is mounted on one of its directories is left out, and so is that directory.
    """
    found: list[tuple[object, ...]] = []
    links: dict[tuple[int, int], bytes] = {}
    top = os.fsencode(root)
    device = os.stat(top + b"/").st_dev
    stack = [b""]
    while stack:
        path = stack.pop()
        full = os.path.join(top, path) if path else top + b"/"
        status = os.lstat(full)
        kind = status.st_mode & 0o170000
        if kind == 0o040000 and status.st_dev != device:
            continue
        first = links.setdefault((status.st_dev, status.st_ino), path) if status.st_nlink > 1 else path
        value: object = None
        if kind == 0o120000:
            value = os.readlink(full)
        elif kind == 0o100000:
            with open(full, "rb") as file:
                value = file.read()
        elif kind == 0o040000:
            stack.extend(path + b"/" + name if path else name for name in sorted(os.listdir(full), reverse=True))
            first = path
        attributes = [
            (name, os.getxattr(full, name, follow_symlinks=False))
            for name in sorted(os.listxattr(full, follow_symlinks=False))
        ]
        owner = status.st_uid, status.st_gid
        row = path, status.st_mode, *owner, status.st_mtime_ns, status.st_rdev, first, tuple(attributes), value
        found.append(row)
    return found


# ---- trees and tars in memory


class PacksData:
    """Packs in memory as what export reads from."""

    def __init__(self, packs: Packs) -> None:
        self._packs = packs

    def read(self, pieces: Iterable[Piece]) -> Generator[memoryview, None, None]:
        for device, at, length in pieces:
            for start in range(0, length, 3000):
                yield memoryview(self._packs.read_device(device, at + start, min(3000, length - start)))


def tar_of(
    tree: Directory, packs: Packs | None = None, *, bottom: bool = True, warnings: list[str] | None = None
) -> bytes:
    """The tar layer of a tree."""
    out = bytearray()
    warn = ([] if warnings is None else warnings).append
    write_tar(tree, PacksData(packs or Packs()), out.extend, bottom=bottom, warn=warn)
    return bytes(out)


def tree_of_tars(*layers: bytes, lower: Directory | None = None) -> Directory:
    """What our own reader makes of tar layers, lowest first; it has nothing to warn of."""
    warnings: list[str] = []
    merge = Merge(lower=lower, warn=warnings.append, limits=DEFAULT_LIMITS)
    for layer in layers:
        read = memoryview(layer)
        reader = MemberReader(
            lambda offset, length, read=read: bytes(read[offset : offset + length]),
            limits=DEFAULT_LIMITS,
            warn=warnings.append,
        )
        merge.apply(reader, Bytes(layer))
    assert [text for text in warnings if "trusted.overlay." not in text] == []
    return merge.tree()


def flat_of(store: Store, layer: Layer, *, jobs: int = 2) -> bytes:
    """The flat form of a layer."""
    out = bytearray()
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_layer(store, layer) as opened,
        ThreadPoolExecutor(jobs) as pool,
        Gatherer(store, layer.packs, pool) as data,
    ):
        written = write_flat(opened, data, out.extend, scratch=scratch, progress=SILENT)
        assert os.listdir(scratch) == []
    assert written.size == len(out)
    return bytes(out)
