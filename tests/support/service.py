"""A node service that keeps everything in memory, behind a real API server."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from layerstore.errors import ConflictError, NotFoundError
from layerstore.progress import Progress
from overlay.service import place
from overlay.service.client import Client
from overlay.service.log import send_to
from overlay.service.request import SandboxRequest
from overlay.service.routes import Document
from overlay.service.server import ApiServer

CHAIN = "sha256:" + "c" * 64
LAYER = "sha256:" + "a" * 64
MANIFEST = "sha256:" + "d" * 64
PREFETCH: Document = {
    "asked": "auto",
    "plan": "tests",
    "plans": [{"name": "tests", "digest": "sha256:" + "e" * 64}],
    "state": "running",
    "planned": 200,
    "brought": 180,
    "present": 10,
    "used": 170,
    "late": 4,
    "failed": 0,
    "requests": 20,
    "raw": 47_185_920,
    "compressed": 17_000_000,
    "left": 10,
    "seconds": 0.75,
    "planned_bytes": 52_428_800,
    "matched_bytes": 52_428_800,
    "problems": [],
}


class FakeService:
    """Answers as the real one does, from dictionaries. ``error`` is raised by whatever is called next."""

    def __init__(self, root: str = "/var/lib/imgtool") -> None:
        self.root = root
        self.calls: list[tuple[Any, ...]] = []
        self.made: dict[str, Document] = {}
        self.receipts: dict[str, Document] = {}
        self.recorded: dict[str, Document] = {}
        self.pinned: dict[str, Document] = {}
        self.error: BaseException | None = None
        self.steps: Sequence[tuple[str, int]] = ()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.entered = threading.Semaphore(0)
        self.on_stop: Callable[[], None] = lambda: None
        self._count = 0

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        self.entered.release()
        if not self.may_go_on.wait(20):
            raise AssertionError("nobody let the service go on")
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def status(self) -> Document:
        self._called("status")
        return {
            "version": "0.1.0",
            "format_version": 1,
            "root": self.root,
            "started": "2026-11-30T11:29:21Z",
            "uptime": 86.5,
            "pids": {"holder": 811, "keeper": 812, "worker": 813},
            "restarts": {"keeper": 0, "worker": 0, "fuse": 0},
            "preferred": {"backend": "fanotify", "why": "the kernel has pre-content events"},
            "backends": {"fanotify": {"guarded_packs": 2, "variant": ""}},
            "read_deadline": 30.0,
            "sandboxes": {
                "total": len(self.made),
                "mode": {"lazy": len(self.made)},
                "condition": {"ok": len(self.made)},
            },
            "layers": {LAYER[7:]: 3, f"{LAYER[7:]}.fuse.2": 1},
            "cache": self._cache(),
            "fetch": {
                "demand": {"requests": 4, "compressed": 700, "raw": 1000, "frames": 5},
                "background": {"requests": 2, "compressed": 7000, "raw": 9000, "frames": 40},
                "queued_demand": 0,
                "queued_background": 0,
                "resting": 0,
                "in_flight": 1,
                "waiting": 1,
                "threads": 8,
                "retries": 0,
                "failures": 0,
                "stalled": 0,
                "coalesced": 0,
                "verified": 0,
                "demand_waits": 3,
                "demand_seconds": 0.07,
            },
            "prefetch": {
                "replays": 1,
                "planned": 200,
                "brought": 180,
                "present": 10,
                "used": 170,
                "late": 4,
                "failed": 0,
                "requests": 20,
                "raw": 47_185_920,
                "compressed": 17_000_000,
                "problems": {"damaged": 1, "unmatched": 0, "failed": 0},
            },
            "recordings": list(self.recorded.values()),
            "events": {"events": 25, "allowed": 24, "waited": 3, "denied": 0, "pending": 1, "packs": 2},
            "stopping": False,
        }

    def sandboxes(self) -> list[Document]:
        self._called("sandboxes")
        return list(self.made.values())

    def sandbox(self, id: str) -> Document:
        self._called("sandbox", id)
        if id not in self.made:
            raise NotFoundError(f"no sandbox {id}; `imgtool ps` lists them")
        return self.made[id]

    def create(self, request: SandboxRequest, progress: Progress) -> list[Document]:
        for step, total in self.steps:
            progress.start(step, total)
            progress.advance(total)
        self._called("create", request)
        found = []
        for name in request.ids():
            if name is None:
                self._count += 1
                name = f"{self._count:012x}"
            if name in self.made:
                raise ConflictError(f"sandbox {name} exists; remove it or choose another id")
            found.append(self._made(name, request))
        return found

    def _made(self, name: str, request: SandboxRequest) -> Document:
        upper = None if request.read_only else f"{self.root}/sandboxes/{name}/upper"
        self.receipts[name] = {"id": name, "mode": "lazy", "backend": "fanotify", "end": None}
        self.made[name] = {
            "id": name,
            "rootfs": f"{self.root}/sandboxes/{name}/rootfs",
            "mode": "lazy",
            "receipt": self.receipts[name],
            "image": {"name": request.base, "manifest": MANIFEST},
            "layers": [LAYER],
            "chain": CHAIN,
            "read_only": request.read_only,
            "scratch": request.scratch,
            "upper": upper,
            "created": 1796037661,
            "mounted": True,
            "backend": "fanotify",
            "why": "the kernel has pre-content events",
            "condition": "ok",
            "demand": {"frames": 0, "bytes": 0, "waited": 0.0, "events": 0, "failed": 0},
            "trace": None,
            "prefetch": PREFETCH if request.plan != "none" else None,
        }
        if request.record is not None:
            self._record(name, request.record.name)
        return self.made[name]

    def remove(self, ids: Sequence[str] | None, *, exit_code: int | None = None) -> list[Document]:
        self._called("remove", ids)
        removed: list[Document] = []
        for name in list(self.made) if ids is None else ids:
            existed = self.made.pop(name, None) is not None
            receipt = self.receipts.get(name) if existed else None
            trace = self._ended(name) if name in self.recorded else None
            removed.append(
                {"id": name, "existed": existed, "stopped": [], "holders": [], "receipt": receipt, "trace": trace}
            )
        return removed

    def traces(self) -> list[Document]:
        self._called("traces")
        return list(self.recorded.values())

    def start_trace(self, id: str, name: str | None) -> Document:
        self._called("start_trace", id, name)
        if id not in self.made:
            raise NotFoundError(f"no sandbox {id}; `imgtool ps` lists them")
        if id in self.recorded:
            raise ConflictError(f"sandbox {id} is being recorded")
        return self._record(id, name)

    def stop_trace(self, id: str) -> Document:
        self._called("stop_trace", id)
        if id not in self.recorded:
            raise NotFoundError(f"sandbox {id} is not being recorded")
        return self._ended(id)

    def _record(self, id: str, name: str | None) -> Document:
        name = name or id
        path = f"{self.root}/traces/{name}.jsonl.part"
        self.made[id]["trace"] = name
        self.recorded[id] = {"sandbox": id, "name": name, "way": "events", "path": path}
        return self.recorded[id]

    def _ended(self, id: str) -> Document:
        name = self.recorded.pop(id)["name"]
        if id in self.made:
            self.made[id]["trace"] = None
        path = f"{self.root}/traces/{name}.jsonl"
        return {"sandbox": id, "name": name, "path": path, "accesses": 689, "bytes": 11_000_000, "complete": True}

    def recover(self) -> list[Document]:
        self._called("recover")
        path = f"{self.root}/sandboxes/lost"
        return [{"kind": "part of a sandbox", "path": path, "action": "removed"}]

    def receipt(self, id: str) -> Document:
        self._called("receipt", id)
        if id not in self.receipts:
            raise NotFoundError(f"no receipt of {id}")
        return self.receipts[id]

    def pins(self) -> list[Document]:
        self._called("pins")
        return list(self.pinned.values())

    def pin(self, name: str, store: str) -> Document:
        self._called("pin", name, store)
        self.pinned[name] = {"name": name, "content": [LAYER[7:]]}
        return self.pinned[name]

    def unpin(self, name: str) -> None:
        self._called("unpin", name)
        if self.pinned.pop(name, None) is None:
            raise NotFoundError(f"{name} is not pinned")

    def cache(self) -> Document:
        self._called("cache")
        return self._cache()

    def _cache(self) -> Document:
        return {
            "bytes": 1_450_000_000,
            "limit": 20_000_000_000,
            "packs": 12,
            "metadata_images": 4,
            "in_use_bytes": 900_000_000,
            "pinned_bytes": 450_000_000,
            "evicted_bytes": 0,
            "unverified_frames": 0,
            "rejected_frames": 0,
            "discarded_packs": 0,
        }

    def evict(self, wanted: int) -> Document:
        self._called("evict", wanted)
        return {"freed": min(wanted, 100_000_000), **self._cache()}

    def stop(self, force: bool) -> Document:
        self._called("stop", force)
        if self.made and not force:
            raise ConflictError("sandboxes are in use: " + ", ".join(self.made))
        self.on_stop()
        return {"stopped": True, "killed": [4711] if force else []}

    def metrics(self) -> bytes:
        self._called("metrics")
        return (
            b"# HELP imgtool_sandboxes Sandboxes that exist.\n# TYPE imgtool_sandboxes gauge\nimgtool_sandboxes 0.0\n"
        )


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """What is logged in the block, all levels; afterwards the log is as it was before."""
    logger = logging.getLogger("imgtool.node")
    before = logger.handlers[:], logger.level, logger.propagate
    kept = _Kept()
    logger.handlers[:] = []
    send_to(kept, "debug")
    try:
        yield kept.records
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers[:], level, logger.propagate = before
        logger.setLevel(level)


@contextlib.contextmanager
def running(service: FakeService, listening: socket.socket, **options: Any) -> Iterator[ApiServer]:
    """An API server in a thread; the block's end shuts it down and waits for it."""
    server = ApiServer(service, listening, **options)
    service.on_stop = server.shutdown
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        service.may_go_on.set()
        server.shutdown()
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def served(directory: Path, service: FakeService, **options: Any) -> Iterator[Client]:
    """A client of ``service``, whose socket is in ``directory``."""
    with (
        place.listen(str(directory)) as listening,
        running(service, listening, **options),
        Client.at(str(directory / place.SOCKET)) as client,
    ):
        yield client
