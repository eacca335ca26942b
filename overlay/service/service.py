"""What the API offers: sandboxes of a node, their receipts, and the state of its cache."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from layerstore.cache.cache import HELD
from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from layerstore.image import load_image
from layerstore.progress import SILENT, Progress
from layerstore.version import FORMAT_VERSION, VERSION
from overlay.holders import Holder
from overlay.images import Asked, NodeImage
from overlay.layerkey import known_key, plain_variant
from overlay.lazy.guards import Guards
from overlay.lazy.rendezvous import FUSE
from overlay.node import RECORDER_LOST, Making, Node
from overlay.process import run_document
from overlay.ready import DIRECT, Way
from overlay.recorded import Record, part_of
from overlay.recording.recordings import RecordedTrace, Recording
from overlay.sandbox import Sandbox
from overlay.service.metrics import Metrics
from overlay.service.options import NodeOptions
from overlay.service.receipt import (
    Host,
    LayerRecord,
    Named,
    PlanRecord,
    Read,
    Reason,
    Receipt,
    Verification,
    rfc3339,
)
from overlay.service.receipts import Receipts
from overlay.service.request import SandboxRequest
from overlay.service.written import written
from prefetch.plans.replay import Replay, ReplayStats

_LOST = "its FUSE server ended: data that weren't there by then can't be read"
_HOUSEKEEPING = 1.0
"""Seconds between two looks at what can be let go, has lived long enough, or is too much."""
_MANY = 10
"""So many at a time are logged at level debug."""
_FINISHING = 10.0
"""Seconds that requests under way get to end before the service does."""
_ENDING = 5.0
"""Seconds that processes which were killed get to end."""

Log = Callable[..., None]


class Service:
    """One node's service. Any thread may call; ``close`` is for the one that made it."""

    def __init__(
        self,
        node: Node,
        options: NodeOptions,
        guards: Mapping[str, Guards],
        *,
        preferred: tuple[str, str],
        processes: Callable[[], Mapping[str, Any]],
        events: Callable[[], Mapping[str, Any]],
        metrics: Metrics,
        log: Log,
    ) -> None:
        """``preferred`` is what auto chooses, and why: fanotify, fuse or eager. ``guards`` are by backend."""
        self._node = node
        self._options = options
        self._guards = guards
        self._preferred = preferred
        self._processes = processes
        self._events = events
        self._metrics = metrics
        self._log = log
        self._receipts = Receipts(node.root)
        self._lock = threading.Lock()
        self._expiry: dict[str, float] = {}
        self._troubles: dict[str, str] = {}
        self._modes: dict[str, str] = {}
        self._suspects: set[str] = set()
        self._started = time.time()
        self._last_request = time.monotonic()
        self._under_way = 0
        self._stopping = False
        self.on_stopped: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        metrics.set_source(self._gauges)

    # --- a life

    def restore(self, held: Sequence[str]) -> None:
        """Find sandboxes again, and take up their times to live."""
        try:
            for left in self._node.recover():
                if not left.action.startswith("kept: not mounted"):  # such a sandbox is about to be mounted again
                    self._log("left by a crash", level="warning", kind=left.kind, path=left.path, action=left.action)
        except ImgtoolError as error:  # what can't be cleared is no reason not to serve the rest
            self._log("not cleared", level="error", error=str(error))
        by_variant = {guards.backend.variant: guards for guards in self._guards.values()}
        self._troubles, suspect = self._node.restore(by_variant, frozenset(held))
        self._node.cache.release(HELD)
        for id, trouble in self._troubles.items():
            self._log("sandbox not restored", level="warning", sandbox=id, why=trouble)
        self._suspects.update(suspect)
        for id, doubt in suspect.items():
            self._log("sandbox is suspect", level="error", sandbox=id, why=doubt)
            with self._logged(id):
                receipt = _receipt_of(self._node.sandboxes.get(id))
                if receipt is not None:
                    self._node.sandboxes.update_receipt(id, receipt.doubted(doubt).to_json())
        for sandbox in self._node.sandboxes.list():
            self._remember(sandbox, by_variant.keys())
        threading.Thread(target=self._keep_house, name="housekeeping", daemon=True).start()

    def _remember(self, sandbox: Sandbox, variants: Collection[str]) -> None:
        """Count a sandbox that was there before, and see what is special about it."""
        self._modes[sandbox.id] = sandbox.state.mode
        if any(_is_fuse(key) and plain_variant(known_key(key)[1]) not in variants for key in sandbox.state.mounts):
            self._troubles.setdefault(sandbox.id, _LOST)
        with self._logged(sandbox.id):
            receipt = _receipt_of(sandbox)
            if receipt is not None and receipt.verification is Verification.SUSPECT:
                self._suspects.add(sandbox.id)
            if receipt is not None and receipt.ttl is not None:
                self._expiry[sandbox.id] = sandbox.state.created + receipt.ttl

    @contextmanager
    def _logged(self, id: str) -> Iterator[None]:
        """An error in the block concerns this sandbox alone."""
        try:
            yield
        except ImgtoolError as error:
            self._log("receipt can't be used", level="warning", sandbox=id, error=str(error))

    def lost(self, front: str) -> None:
        """A front end ended whose mounts can't be served any more."""
        guards = self._guards.get(front)
        if guards is None:
            return
        guards.lost()
        for sandbox in self._node.sandboxes.list():
            variants = [plain_variant(known_key(key)[1]) for key in sandbox.state.mounts if _is_fuse(key)]
            if any(variant != guards.backend.variant for variant in variants):
                self._troubles[sandbox.id] = _LOST

    def close(self) -> None:
        self._ended.set()

    # --- sandboxes

    def create(self, request: SandboxRequest, progress: Progress = SILENT) -> list[dict[str, Any]]:
        """Make ``request.count`` sandboxes; all of them or none."""
        with self._working():
            started = time.monotonic()
            way = self._way(request)
            image = self._node.images.find(
                Asked(request.store, request.base, request.workspace, request.toolkits, request.force)
            )
            found: list[dict[str, Any]] = []
            try:
                for id, trace in zip(request.ids(), request.traces(), strict=True):
                    found.append(self._create(request, image, way, id, trace, progress))
            except BaseException:
                for made in found:
                    self._end(made["id"], Reason.FAILED)
                raise
            self._metrics.observe_up(way.mode, time.monotonic() - started, len(found))
            return found

    def _create(
        self, request: SandboxRequest, image: NodeImage, way: Way, id: str | None, trace: str | None, progress: Progress
    ) -> dict[str, Any]:
        began = time.monotonic()

        def describe(making: Making) -> Mapping[str, object]:
            return self._describe(request, image, making).to_json()

        sandbox = self._node.up(
            image,
            way,
            id=id,
            read_only=request.read_only,
            scratch=request.scratch,
            record=None if request.record is None else Record(trace, request.command),
            plan=request.plan,
            wait_prefetch=request.wait_prefetch,
            describe=describe,
            progress=progress,
        )
        try:
            if request.receipts is not None:
                _required(_receipt_of(sandbox)).write(request.receipts)
        except ImgtoolError:
            self._end(sandbox.id, Reason.FAILED)
            raise
        self._modes[sandbox.id] = way.mode
        if request.ttl is not None:
            self._expiry[sandbox.id] = time.time() + request.ttl
        self._log(
            "up",
            level="info" if request.count < _MANY else "debug",
            sandbox=sandbox.id,
            image=image.identity["name"],
            mode=way.mode,
            backend=way.backend,
            seconds=round(time.monotonic() - began, 6),
        )
        traced = {} if request.record is None else {sandbox.id: trace or sandbox.id}
        return {**self._document(sandbox, traced, stands=True), "run": run_document(image.config.run)}

    def _describe(self, request: SandboxRequest, image: NodeImage, making: Making) -> Receipt:
        way, fetched = making.way, making.fetched
        if way.mode == DIRECT:
            verification = Verification.IN_PLACE
        else:
            verification = Verification.AGAIN if self._node.cache.unclean else Verification.VERIFIED
        return Receipt(
            id=making.id,
            started=rfc3339(time.time()),
            images=tuple(Named(role, asked, str(manifest)) for role, asked, manifest in image.names),
            layers=tuple(LayerRecord.of(layer) for layer in image.layers),
            chain=image.chain,
            store=image.store.location,  # without credentials that a URL may have had
            mode=way.mode,
            backend=way.backend,
            why=way.why,
            verification=verification,
            host=Host.here(),
            isolation=request.isolation,
            read_only=request.read_only,
            scratch=request.scratch,
            ttl=request.ttl,
            receipts=request.receipts,
            fetched_bytes=fetched.compressed,
            fetched_requests=fetched.requests,
            plan=_plan_record(making),
            trace=making.trace,
            carried=request.carried,
        )

    def _way(self, request: SandboxRequest) -> Way:
        preferred, why = self._preferred
        if request.mode == "direct":
            return Way(DIRECT, "raw packs", "asked for: raw packs of the store are read in place")
        if request.mode == "eager":
            return Way("eager", "files", "asked for: everything is fetched before the mount")
        name = request.backend or preferred
        if name == "eager":
            if request.mode == "lazy":
                raise UnsupportedError(f"this machine can't load lazily: {why}; see `imgtool doctor`")
            return Way("eager", "files", why)
        guards = self._guards.get(name)
        if guards is None:
            raise UnsupportedError(f"backend {name} does not work here; see `imgtool doctor`")
        return Way("lazy", name, why if request.backend is None else "asked for", guards)

    def sandboxes(self) -> list[dict[str, Any]]:
        traced = self._traced()
        known: dict[Replay, ReplayStats] = {}
        return [self._document(sandbox, traced, known) for sandbox in self._node.sandboxes.list()]

    def sandbox(self, id: str) -> dict[str, Any]:
        return self._document(self._node.sandboxes.get(id), self._traced())

    def _traced(self) -> dict[str, str]:
        """Names of the traces that are being recorded, by sandbox."""
        return {recording.id: recording.name for recording in self._node.recordings()}

    def _document(
        self,
        sandbox: Sandbox,
        traced: Mapping[str, str],
        known: dict[Replay, ReplayStats] | None = None,
        *,
        stands: bool | None = None,
    ) -> dict[str, Any]:
        stands = sandbox.stands if stands is None else stands
        receipt = sandbox.state.receipt
        verification = receipt.get("verification", {})
        trouble = self._troubles.get(sandbox.id)
        if stands and trouble is None and not self._node.is_served(sandbox):
            trouble = RECORDER_LOST
        if isinstance(verification, dict) and verification.get("state") == Verification.SUSPECT:
            condition = f"suspect: {verification.get('detail')}"
        elif not stands:
            condition = "not mounted" if trouble is None else f"not mounted: {trouble}"
        else:
            condition = "ok" if trouble is None else f"impaired: {trouble}"
        return {
            **sandbox.to_json(),
            "mounted": stands,
            "backend": receipt.get("backend", "files"),
            "why": receipt.get("why", ""),
            "condition": condition,
            "demand": asdict(self._node.demanded(sandbox.id)),
            "trace": traced.get(sandbox.id),
            "prefetch": self._node.prefetched(sandbox.id, known),
        }

    def remove(self, ids: Sequence[str] | None, *, exit_code: int | None = None) -> list[dict[str, Any]]:
        """Remove sandboxes, None: all of them."""
        with self._working():
            names = [sandbox.id for sandbox in self._node.sandboxes.list()] if ids is None else list(ids)
            reason = Reason.DOWN if exit_code is None else Reason.RUN
            return [self._end(name, reason, exit_code, alone=len(names) < _MANY) for name in names]

    def _end(self, id: str, reason: Reason, exit_code: int | None = None, *, alone: bool = True) -> dict[str, Any]:
        receipt = self._final(id, reason, exit_code)
        if receipt is not None:  # kept first: there is always one or the other
            try:
                self._receipts.keep(receipt)
                if receipt.receipts is not None:
                    receipt.write(receipt.receipts)
            except ImgtoolError as error:
                self._log("receipt not kept", level="error", sandbox=id, error=str(error))
        removal = self._node.down(id, failed=reason is Reason.FAILED)
        self._expiry.pop(id, None)
        self._troubles.pop(id, None)
        self._modes.pop(id, None)
        self._suspects.discard(id)
        self._log("down", level="info" if alone else "debug", sandbox=id, reason=str(reason), existed=removal.existed)
        return {
            "id": id,
            "existed": removal.existed,
            "stopped": list(removal.stopped),
            "holders": [str(holder) for holder in removal.holders],
            "receipt": None if receipt is None else receipt.to_json(),
            "trace": None if removal.trace is None else _trace_document(id, removal.trace),
        }

    def _final(self, id: str, reason: Reason, exit_code: int | None) -> Receipt | None:
        """The receipt of a sandbox about to be removed; None where there is none that can be read."""
        try:
            sandbox = self._node.sandboxes.get(id)
            receipt = _receipt_of(sandbox)
        except NotFoundError:
            return None
        except ImgtoolError as error:
            self._log("no receipt", level="warning", sandbox=id, error=str(error))
            return None
        if receipt is None:
            return None
        demanded = self._node.demanded(id)
        wrote = None if sandbox.upper is None else written(sandbox.upper)
        return receipt.ending(
            reason,
            read=Read(demanded.frames, demanded.bytes, demanded.waited, demanded.events),
            wrote=wrote,
            exit_code=exit_code,
            prefetch=self._node.prefetched(id),
        )

    def receipt(self, id: str) -> dict[str, Any]:
        """That of a sandbox that stands, or of one that has ended."""
        try:
            receipt = _receipt_of(self._node.sandboxes.get(id))
        except NotFoundError:
            return self._receipts.get(id).to_json()
        if receipt is None:
            raise NotFoundError(f"sandbox {id} was made without a receipt")
        return receipt.to_json()

    def recover(self) -> list[dict[str, Any]]:
        with self._working():
            return [{"kind": item.kind, "path": item.path, "action": item.action} for item in self._node.recover()]

    # --- traces

    def traces(self) -> list[dict[str, Any]]:
        return [self._recording_document(recording) for recording in self._node.recordings()]

    def _recording_document(self, recording: Recording) -> dict[str, Any]:
        path = part_of(self._node.root, recording.name)
        return {"sandbox": recording.id, "name": recording.name, "way": recording.way, "path": path}

    def start_trace(self, id: str, name: str | None) -> dict[str, Any]:
        """Record what a sandbox that stands reads from now on; see :meth:`Node.record`."""
        with self._working():
            recording = self._node.record(id, Record(name))
            self._log("recording", sandbox=id, trace=recording.name, way=recording.way)
            return self._recording_document(recording)

    def stop_trace(self, id: str) -> dict[str, Any]:
        with self._working():
            return _trace_document(id, self._node.stop_trace(id))

    # --- cache

    def pin(self, name: str, store: str) -> dict[str, Any]:
        """Keep what the node has and will have of image ``name``."""
        image = load_image(self._node.stores.open(store), name)
        content = {pack.digest.hex for layer in image.layers for pack in layer.packs}
        content |= {layer.metadata.hex for layer in image.layers}
        self._node.cache.pin(name, sorted(content))
        return {"name": name, "content": sorted(content)}

    def unpin(self, name: str) -> None:
        if not self._node.cache.unpin(name):
            raise NotFoundError(f"nothing is pinned as {name!r}; `imgtool node pins` lists what is")

    def pins(self) -> list[dict[str, Any]]:
        return [{"name": name, "content": content} for name, content in self._node.cache.pins().items()]

    def evict(self, wanted: int) -> dict[str, Any]:
        """Free ``wanted`` bytes of the cache, of what nobody uses."""
        freed = self._node.cache.make_room(wanted)
        self._log("evicted", asked=wanted, freed=freed)
        return {"freed": freed, **self.cache()}

    def cache(self) -> dict[str, Any]:
        return asdict(self._node.cache.status())

    # --- state

    def status(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "format_version": FORMAT_VERSION,
            "root": self._node.root,
            "started": rfc3339(self._started),
            "uptime": round(time.time() - self._started, 3),
            **self._processes(),
            "preferred": {"backend": self._preferred[0], "why": self._preferred[1]},
            "backends": {
                name: {"guarded_packs": guards.count(), "variant": guards.backend.variant}
                for name, guards in self._guards.items()
            },
            "read_deadline": self._options.read_deadline,
            "sandboxes": self._counts(),
            "layers": self._node.layers.users(),
            "cache": self.cache(),
            "fetch": asdict(self._node.fetcher.stats()),
            "prefetch": self._node.planned.status(),
            "recordings": self.traces(),
            "events": dict(self._events()),
            "stopping": self._stopping,
        }

    def _counts(self) -> dict[str, Any]:
        """As far as they are known here: `ps` looks at each, which takes a while for thousands."""
        modes = Counter(list(self._modes.values()))
        suspect, impaired = len(self._suspects), len(self._troubles.keys() - self._suspects)
        conditions = {"ok": modes.total() - suspect - impaired, "suspect": suspect, "impaired": impaired}
        return {
            "total": modes.total(),
            "mode": dict(modes),
            "condition": {name: count for name, count in conditions.items() if count},
        }

    def metrics(self) -> bytes:
        return self._metrics.text()

    def _gauges(self) -> dict[str, Any]:
        return self.status()

    # --- the end

    def stop(self, force: bool, *, idle: bool = False) -> dict[str, Any]:
        """Unmount what needs answers, then end. What is whole stays mounted. ``idle``: only if there is no sandbox.

        Raises:
            ConflictError: processes use a sandbox that isn't whole, unless ``force``, which kills them.
        """
        with self._lock:
            if self._stopping:
                raise ConflictError("the node service is stopping already")
            self._stopping = True
        self._node.planned.hurry(True)
        try:
            self._wait_for_requests()
            if idle and self._node.sandboxes.list():
                raise ConflictError("a sandbox has been made just now")
            killed = self._unmount(force)
            killed += self._wait_for_mounts(force)
        except BaseException:
            self._stopping = False
            self._node.planned.hurry(False)
            by_variant = {guards.backend.variant: guards for guards in self._guards.values()}
            self._troubles.update(self._node.resume(by_variant))
            raise
        for id in self._node.end_recordings():  # of sandboxes that stay mounted: nobody is left who could be asked
            self._log("trace ended", sandbox=id)
        self._log("unmounted", killed=killed)
        threading.Thread(target=self.on_stopped, name="stop").start()
        return {"stopped": True, "killed": killed}

    def _wait_for_requests(self) -> None:
        """Until what is being made or removed is done; nothing new begins."""
        until = time.monotonic() + _FINISHING
        while self._under_way:
            if time.monotonic() > until:
                raise ConflictError(f"{self._under_way} requests are under way still; try again when they are done")
            time.sleep(0.01)

    def _unmount(self, force: bool) -> list[int]:
        """Unmount what needs answers; the processes that had to be killed for that."""
        killed: list[int] = []
        until = time.monotonic() + _ENDING
        while True:
            busy = self._node.suspend()
            if not busy:
                return killed
            id, holders = next(iter(busy.items()))
            if not force:
                more = f", and {len(busy) - 1} more are" if len(busy) > 1 else ""
                raise ConflictError(
                    f"sandbox {id} is in use by {', '.join(map(str, holders[:5])) or 'a mount'}{more}; "
                    "`imgtool node stop --force` ends what uses it"
                )
            if time.monotonic() > until:
                raise UnavailableError(f"sandbox {id} stays in use by {', '.join(map(str, holders[:5]))}")
            killed += _kill(holder for holders in busy.values() for holder in holders)
            time.sleep(0.05)

    def _wait_for_mounts(self, force: bool) -> list[int]:
        """Until nothing that needs answers is mounted any more: a detached mount lives as long as somebody is in it.

        Returns:
            Processes that had to be killed for that.

        Raises:
            ConflictError: it stays mounted. Then nobody may stop answering, whoever wants that.
        """
        killed: list[int] = []
        until = time.monotonic() + _ENDING
        while True:
            left = sum(guards.incomplete() for guards in self._guards.values())
            if not left:
                return killed
            strays = self._node.strays()
            if force:
                killed += _kill(strays)
            if time.monotonic() > until:
                who = ", ".join(map(str, strays[:5])) or "something"
                advice = "end it" if force else "end it, or `imgtool node stop --force`"
                raise ConflictError(f"{who} uses a removed sandbox, and {left} of its packs aren't complete; {advice}")
            for guards in self._guards.values():
                guards.sweep()
            time.sleep(0.05)

    def _keep_house(self) -> None:
        while not self._ended.wait(_HOUSEKEEPING):
            try:
                self._tidy()
            except ImgtoolError as error:
                self._log("housekeeping", level="error", error=str(error))

    def _tidy(self) -> None:
        for name, guards in self._guards.items():
            for hex in guards.sweep():
                self._log("pack needs no guard any more", level="debug", pack=hex, backend=name)
        self._end_expired()
        freed = self._node.cache.trim()
        if freed:
            self._log("evicted", freed=freed, why="over the limit")
        idle = self._options.idle_exit
        is_idle = idle is not None and not self._under_way and time.monotonic() - self._last_request > idle
        if is_idle and not self._node.sandboxes.list():
            self._log("idle", seconds=idle)
            self.stop(force=False, idle=True)

    def _end_expired(self) -> None:
        now = time.time()
        for id in [id for id, at in list(self._expiry.items()) if at <= now]:
            try:
                with self._working():
                    if self._is_expired(id, now):
                        self._log("time to live is over", sandbox=id)
                        self._end(id, Reason.TTL)
                    else:
                        self._expiry.pop(id, None)
            except ImgtoolError as error:  # the others' time is over nonetheless
                self._log("sandbox not ended", level="error", sandbox=id, error=str(error))

    def _is_expired(self, id: str, now: float) -> bool:
        """Whether it is still the sandbox whose time was noted: names are used again."""
        try:
            sandbox = self._node.sandboxes.get(id)
        except NotFoundError:
            return False
        receipt = _receipt_of(sandbox)
        return receipt is not None and receipt.ttl is not None and sandbox.state.created + receipt.ttl <= now

    def _working(self) -> _Working:
        return _Working(self)

    def begin(self) -> None:
        with self._lock:
            if self._stopping:
                raise UnavailableError("the node service is stopping; try again when it has")
            self._under_way += 1

    def finish(self) -> None:
        with self._lock:
            self._under_way -= 1
            self._last_request = time.monotonic()


class _Working:
    """A request under way: the service neither stops nor counts as idle meanwhile."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def __enter__(self) -> None:
        self._service.begin()

    def __exit__(self, *exc: object) -> None:
        self._service.finish()


def _kill(holders: Iterable[Holder]) -> list[int]:
    """The processes that there were."""
    killed = []
    for pid in {holder.pid for holder in holders}:
        try:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        except ProcessLookupError:
            pass
    return killed


def _plan_record(making: Making) -> PlanRecord | None:
    if making.planned is None:
        return None
    return PlanRecord(making.planned.choice, making.planned.plans, *making.planned.coverage())


def _trace_document(id: str, trace: RecordedTrace) -> dict[str, Any]:
    return {
        "sandbox": id,
        "name": trace.name,
        "path": trace.path,
        "accesses": trace.accesses,
        "bytes": trace.bytes,
        "complete": trace.complete,
    }


def _is_fuse(key: str) -> bool:
    return known_key(key)[1].startswith(FUSE)


def _receipt_of(sandbox: Sandbox) -> Receipt | None:
    document = sandbox.state.receipt
    return Receipt.from_json(document) if document.get("magic") else None


def _required(receipt: Receipt | None) -> Receipt:
    assert receipt is not None
    return receipt
