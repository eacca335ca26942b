"""A node: one root directory with a cache and sandboxes. Brings published images to where they are mounted.

One process owns a root at a time: the worker of the node service, or a program that uses this module itself. Its mounts
and sandboxes outlive it, and :meth:`Node.restore` finds them again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from layerstore.cache.cache import Cache
from layerstore.cache.packs import CachedPack
from layerstore.errors import ConflictError, ImgtoolError, NotFoundError, UnavailableError, os_errors
from layerstore.progress import SILENT, Progress
from layerstore.store.opening import Stores
from overlay.holders import Holder, holders_by_device
from overlay.images import Images, NodeImage
from overlay.layerkey import is_recorded, join_key, known_key, plain_key, plain_variant
from overlay.layers import Leftover, MountableLayer
from overlay.lazy.guards import Guards
from overlay.planned import AUTO, NONE, PlannedStart, PlannedStarts
from overlay.ready import DIRECT, ReadyLayers, Way
from overlay.recorded import Record, RecordedSandboxes
from overlay.recording.recordings import RecordedTrace, Recording
from overlay.sandbox import Removal, Sandbox, Sandboxes, new_id
from prefetch.fetcher import Fetched, Fetcher
from prefetch.plans.replay import Replay, ReplayStats
from prefetch.readahead import ReadAhead
from prefetch.statistics import UNOBSERVED, Observer

_LAYERS_AT_ONCE = 4
"""Of one image, where they are fetched."""
FILES = Way("eager", "files", "everything is fetched before the mount")


@dataclass
class Demanded:
    """What one sandbox had to wait for: data that weren't on the node when it read them."""

    frames: int = 0
    bytes: int = 0
    waited: float = 0.0
    events: int = 0
    failed: int = 0


@dataclass
class _Standing:
    """What a sandbox that is mounted holds: layers, by plain key; what is fetched ahead; st_dev of its file system."""

    keys: list[str] = field(default_factory=list)
    devices: set[int] = field(default_factory=set)
    planned: PlannedStart | None = None


@dataclass(frozen=True, slots=True)
class Making:
    """A sandbox about to be made.

    Attributes:
        id: its name.
        way: how its data are reached.
        fetched: what was fetched for it.
        planned: what is fetched ahead for it; None: nothing is.
        trace: name of the trace of what it reads; None: there is none.
    """

    id: str
    way: Way
    fetched: Fetched
    planned: PlannedStart | None = None
    trace: str | None = None


RECORDER_LOST = "the recorder that it was read through ended: what it has not read yet can't be read"

Describe = Callable[[Making], Mapping[str, object]]
"""Makes the receipt."""


class Node:
    """``root`` holds ``cache/``, ``layers/`` and ``sandboxes/``. Any thread may call. Use as a context manager."""

    def __init__(
        self,
        root: str,
        *,
        limit: int | None = None,
        threads: int = 16,
        bandwidth: int | None = None,
        held: Mapping[str, tuple[int, int]] | None = None,
        observer: Observer = UNOBSERVED,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take the root's cache.

        Args:
            root: made where there is none.
            limit: bytes of the cache.
            threads: requests to stores at once.
            bandwidth: bytes a second that plans may take from stores, all together.
            held: descriptors of packs that a process before this one had open: data and frame map, by hex.
            observer: is told what is fetched.
            warn: is told, in one line, what was found damaged and what became of it.

        Raises:
            ConflictError: another process owns this root.
        """
        self.root = os.path.realpath(root)
        self.stores = Stores()
        self.images = Images(self.stores)
        self.cache = Cache(self.root, limit=limit, held=held or {}, warn=warn)
        self.fetcher = Fetcher(self.stores.open, self._make_room, threads=threads, observer=observer, ahead=ReadAhead())
        self.sandboxes = Sandboxes(self.root)
        self.layers = ReadyLayers(self.cache, self.fetcher)
        self.planned = PlannedStarts(
            self.root, self.fetcher, uses=self.cache.metadata.uses_of, bandwidth=bandwidth, warn=warn
        )
        self._recorded = RecordedSandboxes(self.root, self.cache, warn)
        self._renewing = threading.Lock()
        """Held around mounting a layer anew. Taken before ``_lock``."""
        self._recording_anew = threading.Lock()
        """Held around mounting a sandbox anew to record it. Taken before ``_renewing``."""
        self._lock = threading.Lock()
        """Guards everything below."""
        self._doubtful: set[str] = set()
        """Layers that were mounted while nobody watched them: mounted anew before somebody new stands on them."""
        self._standing: dict[str, _Standing] = {}
        self._suspended: list[Sandbox] = []
        self._demanded: dict[str, Demanded] = {}
        self._by_device: dict[int, str] = {}
        """Sandboxes by the st_dev of their root file systems."""
        self._detached: set[int] = set()
        """Of removed ones that somebody was in."""

    def up(
        self,
        image: NodeImage,
        way: Way = FILES,
        *,
        id: str | None = None,
        read_only: bool = False,
        scratch: int | None = None,
        record: Record | None = None,
        plan: str = AUTO,
        wait_prefetch: bool = False,
        describe: Describe | None = None,
        progress: Progress = SILENT,
    ) -> Sandbox:
        """Make a sandbox.

        Args:
            image: of which.
            way: how its data are reached. Only what is loaded lazily is fetched ahead.
            id: its name; None makes one up.
            read_only: nothing can be written.
            scratch: bytes that can.
            record: what it reads; see :meth:`RecordedSandboxes.over`.
            plan: what is fetched ahead: auto, none, or the name of a plan. A plan that can't be used is no error.
            wait_prefetch: all of that is there before the sandbox is.
            describe: makes its receipt.
            progress: is told of what is fetched before it is there.

        Raises:
            NotFoundError: there is no plan of that name.
            And what :meth:`Sandboxes.create`, :meth:`ReadyLayers.take` and recording raise.
        """
        self.planned.check(plan)
        name = new_id() if id is None else id
        with self._held() as keys:
            mountable, fetched = self._take_all(image, way, keys, progress)
            planned = self._begin(image, way, keys, plan)
            sandbox: Sandbox | None = None
            try:
                if wait_prefetch and planned is not None:
                    planned.wait(progress)
                with self._recording(name, record, mountable, image.identity, way) as (over, trace):
                    making = Making(name, way, fetched, planned, trace)
                    sandbox = self.sandboxes.create(
                        over,
                        image=image.identity,
                        mode=way.mode,
                        id=name,
                        read_only=read_only,
                        scratch=scratch,
                        receipt=_receipt(way) if describe is None else describe(making),
                    )
            except BaseException:
                try:
                    if sandbox is not None:  # it stands, and nothing of it is recorded
                        self.sandboxes.remove(name)
                finally:
                    if planned is not None:
                        self.planned.end(planned)
                raise
            self._stand(sandbox, keys, planned)
        return sandbox

    def _take_all(
        self, image: NodeImage, way: Way, keys: list[str], progress: Progress
    ) -> tuple[list[MountableLayer], Fetched]:
        """The layers of an image, ready, and what that cost. What is held is in ``keys``, also when it raises.

        Several that are new here are fetched at the same time.
        """

        def take(number: int) -> tuple[MountableLayer, Fetched]:
            asked = image.names[number if len(image.names) > 1 else 0][1]
            ready, cost = self.layers.take(image.layers[number], image.store, way, name=asked, progress=progress)
            keys.append(ready.key)
            self._renew(ready)
            return ready, cost

        numbers = range(len(image.layers))
        if len(numbers) > 1 and sum(not self.cache.metadata.has(layer) for layer in image.layers) > 1:
            with ThreadPoolExecutor(min(len(numbers), _LAYERS_AT_ONCE), "take-layer") as pool:
                taken = list(pool.map(take, numbers))
        else:
            taken = [take(number) for number in numbers]
        return [ready for ready, _ in taken], sum((cost for _, cost in taken), Fetched())

    def _begin(self, image: NodeImage, way: Way, keys: Sequence[str], plan: str) -> PlannedStart | None:
        if way.guards is None or plan == NONE:
            return None  # its data are all here, or never come here
        packs = [pack for key in keys for pack in self.layers.packs(key)]
        return self.planned.begin(plan, [layer.metadata for layer in image.layers], packs, image.store)

    @contextmanager
    def _recording(
        self,
        id: str,
        record: Record | None,
        layers: list[MountableLayer],
        image: Mapping[str, object],
        way: Way,
    ) -> Iterator[tuple[list[MountableLayer], str | None]]:
        """What a new sandbox is mounted over in the block, and the name of its trace."""
        if record is None:
            yield layers, None
            return
        self.sandboxes.check_free(id)  # else it would be that one's recording that is in the way
        with self._recorded.over(id, record, layers, image=image, mode=way.mode, backend=way.backend) as (over, made):
            yield over, made.name

    def down(self, id: str, *, failed: bool = False) -> Removal:
        """Remove a sandbox; see :meth:`Sandboxes.remove`. ``failed``: it wasn't made as asked for: keep no trace."""
        recorded = self._is_recorded(id)
        removal = self.sandboxes.remove(id)
        if failed and recorded:
            self._recorded.discard(id)
        elif removal.existed and recorded:  # else one may be about to be made whose reads are recorded already
            removal = replace(removal, trace=self._recorded.ended(id, unmounted=not removal.holders))
        with self._lock:
            self._demanded.pop(id, None)
            if removal.holders and id in self._standing:
                self._detached |= self._standing[id].devices
        self._fall(id)
        return removal

    def _is_recorded(self, id: str) -> bool:
        """Whether a sandbox stands over mounts that are recorded, or were, as far as can be told.

        Else a recorder of its name is that of one before it, which somebody is in still.
        """
        try:
            return any(map(is_recorded, self.sandboxes.get(id).state.mounts))
        except ImgtoolError:
            return True

    def strays(self) -> list[Holder]:
        """Who still uses sandboxes that this process has removed: what they read has to be answered, too."""
        with self._lock:
            detached = self._detached - self._by_device.keys()  # numbers are used again
        found = holders_by_device(detached)
        with self._lock:
            self._detached.intersection_update(found)
        return [holder for holders in found.values() for holder in holders]

    # --- traces

    def record(self, id: str, record: Record) -> Recording:
        """Record what a sandbox reads from now on; it is mounted anew for that.

        Raises:
            NotFoundError: no such sandbox.
            ConflictError: somebody is in it, it isn't mounted, it can't be mounted again, it is being recorded, or
                there is a trace of this name.
            UnavailableError: what it reads can't be seen. Or it could not be mounted again: then it isn't any more.
        """
        with self._recording_anew:
            return self._record(id, record)

    def _record(self, id: str, record: Record) -> Recording:
        sandbox = self.sandboxes.get(id)
        with self._lock:
            standing = id in self._standing
        if not standing or not sandbox.stands:
            raise ConflictError(f"sandbox {id} is not mounted as it should be, so that nothing of it can be recorded")
        if any(recording.id == id for recording in self.recordings()):
            raise ConflictError(f"sandbox {id} is recorded already; `imgtool trace stop {id}` ends that")
        self._refuse_busy(id)
        with self._held() as keys:
            layers = []
            for key in map(plain_key, sandbox.state.mounts):
                layers.append(self.layers.retake(key, None))  # it is held, so nothing is asked of guards
                keys.append(key)
                self._refuse_unmountable(id, layers[-1])
            try:
                self.sandboxes.suspend(id)
            except ConflictError:
                self._refuse_busy(id)
                raise
            try:
                if any(map(is_recorded, sandbox.state.mounts)):
                    self._recorded.release(id)
                return self._resume_recorded(sandbox, record, layers)
            except BaseException:
                self.sandboxes.suspend(id)  # it may stand over what is recorded no more
                self.sandboxes.resume(id, layers)
                raise
            finally:
                self._locate(sandbox)

    def _resume_recorded(self, sandbox: Sandbox, record: Record, layers: list[MountableLayer]) -> Recording:
        state = sandbox.state
        backend = str(state.receipt.get("backend", ""))
        with self._recorded.over(sandbox.id, record, layers, image=state.image, mode=state.mode, backend=backend) as (
            over,
            recording,
        ):
            self.sandboxes.resume(sandbox.id, over)
            return recording

    def _refuse_unmountable(self, id: str, layer: MountableLayer) -> None:
        """Raises ConflictError: a layer stands, and could not be mounted another time.

        Where a process before this one found raw packs isn't known; a server that has ended has its files no more.
        """
        packs = self.cache.metadata.packs_of(layer.digest)
        if len(layer.devices) != len(packs) or not all(map(os.path.exists, layer.devices)):
            raise ConflictError(
                f"sandbox {id} could not be mounted again for that: where its data are read is known no more, or gone; "
                "record from the start with `imgtool up --record`"
            )

    def _refuse_busy(self, id: str) -> None:
        """Raises ConflictError: somebody is in it."""
        holders = self.sandboxes.busy([id]).get(id)
        if holders:
            who = ", ".join(map(str, holders[:5]))
            raise ConflictError(
                f"sandbox {id} is in use by {who}, and recording mounts it anew; "
                "stop them, or record from the start with `imgtool up --record`"
            )

    def stop_trace(self, id: str) -> RecordedTrace:
        """End the trace of a sandbox, which goes on.

        Raises:
            NotFoundError: it is not being recorded.
        """
        return self._recorded.stop(id)

    def recordings(self) -> list[Recording]:
        """Those that go on."""
        return self._recorded.active()

    def end_recordings(self) -> list[str]:
        """End all traces; the names of the sandboxes. Those that need their recorder have to be unmounted before."""
        ended = [
            recording.id
            for recording in self.recordings()
            if self._recorded.ended(recording.id, unmounted=False) is not None
        ]
        self._recorded.sweep(lambda id: False)
        return ended

    # --- what stands

    def _stand(self, sandbox: Sandbox, keys: list[str], planned: PlannedStart | None = None) -> None:
        """The sandbox holds the layers of ``keys``, which it empties, until it falls. Perhaps it has fallen already."""
        with self._lock:
            standing = self._standing.setdefault(sandbox.id, _Standing())
            standing.keys += keys
            standing.planned = planned
            keys.clear()
        self._locate(sandbox)

    def _locate(self, sandbox: Sandbox) -> None:
        """Note where it is mounted, so that its readers can be told."""
        try:
            device = os.stat(sandbox.rootfs).st_dev
            gone = device == os.stat(sandbox.directory).st_dev
        except FileNotFoundError:
            gone = True
        except OSError:
            return  # it is there, and who reads from it can't be told
        if gone:  # somebody has removed it meanwhile, and found nothing to give back
            self._fall(sandbox.id)
            return
        with self._lock:
            standing = self._standing.get(sandbox.id)
            if standing is None:
                return
            for other in standing.devices - {device}:
                if self._by_device.get(other) == sandbox.id:
                    del self._by_device[other]
            standing.devices = {device}
            self._by_device[device] = sandbox.id

    def _fall(self, id: str) -> None:
        """The sandbox is gone, or not mounted any more: it holds nothing."""
        with self._lock:
            standing = self._standing.pop(id, _Standing())
            for device in standing.devices:
                if self._by_device.get(device) == id:
                    del self._by_device[device]
        if standing.planned is not None:
            self.planned.end(standing.planned)  # before its packs may be evicted
        for key in standing.keys:
            self.layers.give_back(key)

    def recover(self) -> list[Leftover]:
        """Clear what crashes left: see :meth:`Sandboxes.recover`, and unfinished files of the cache."""
        found = self.sandboxes.recover()
        with os_errors(f"clear {self.root}/cache"):
            freed = self.cache.reclaim()
        if freed:
            found.append(Leftover("unfinished files", f"{self.root}/cache", f"removed, {freed} bytes"))
        return found

    # --- after a restart, and before one

    def restore(self, guards: Mapping[str, Guards], held: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Find sandboxes again; asks no store.

        A sandbox that lost its mounts in an orderly stop gets them back. One that kept them while nobody answered for
        missing data is watched again from now on, and suspect: what it read meanwhile may be zeros. New sandboxes don't
        share its mounts.

        Args:
            guards: by plain variant of mounts: ``""``, and that of the FUSE server that runs.
            held: packs, by hex, that somebody answered for all the time.

        Returns:
            what is wrong with a sandbox, and why another is suspect, by id.
        """
        troubled: dict[str, str] = {}
        suspect: dict[str, str] = {}
        unwatched, unknown = self._unwatched(held)
        with self._lock:  # to a mount that is recorded nobody new comes
            self._doubtful = {key for key in unwatched | unknown if not is_recorded(key)}
        if not held:  # neither do we know that anybody answered
            unwatched |= unknown
        found = self.sandboxes.list()
        for sandbox in found:
            try:
                if sandbox.stands and not unwatched.isdisjoint(sandbox.state.mounts):
                    suspect[sandbox.id] = f"nobody answered for data that had not been fetched, until {_now()}"
                self._take_again(sandbox, guards)
            except ImgtoolError as error:
                troubled[sandbox.id] = str(error)
        ids = {sandbox.id for sandbox in found}
        for recording in self.recordings():
            if recording.id not in ids:
                # It went, or was never made, while we were gone; perhaps somebody is in it still.
                self._recorded.ended(recording.id, unmounted=False)
        self._recorded.sweep(ids.__contains__)
        return troubled, suspect

    def _unwatched(self, held: Collection[str]) -> tuple[set[str], set[str]]:
        """Layers that are mounted over data which aren't there, with nobody to answer for them.

        And those of which it can't be told what is there.
        """
        unwatched, unknown = set(), set()
        for key in self.sandboxes.layers.mounted():
            digest, variant = known_key(key)
            if plain_variant(variant):
                continue  # a FUSE server answers, or there are errors; in a store nothing is missing
            try:
                if any(hex not in held for hex in self.layers.missing(digest)):
                    unwatched.add(key)
            except ImgtoolError:
                unknown.add(key)
        return unwatched, unknown

    def _renew(self, layer: MountableLayer) -> None:
        """Mount a doubtful layer anew. Whoever stands on the mount that there was keeps that."""
        with self._renewing:
            if layer.key not in self._doubtful:
                return
            try:
                self.sandboxes.layers.remount(layer.key, layer.image, layer.devices)
            except NotFoundError:
                if self.sandboxes.layers.users(layer.key):
                    raise  # it lacks one of its devices
                # else it was unmounted with the last who stood on it
            with self._lock:
                self._doubtful.discard(layer.key)

    def _take_again(self, sandbox: Sandbox, guards: Mapping[str, Guards]) -> None:
        """Hold its layers, and mount it if it isn't."""
        stands = sandbox.stands
        if stands and not self._recorded.adopt(sandbox.id, sandbox.state.mounts):
            raise UnavailableError(RECORDER_LOST)
        with self._held() as keys:
            layers = []
            for key in sandbox.state.mounts:
                plain = plain_key(key)
                digest, variant = known_key(plain)
                watching = guards.get(variant)
                if not stands:
                    plain, watching = self._mountable_again(digest, variant, guards)
                elif watching is None and variant not in ("", DIRECT):
                    raise UnavailableError("its FUSE server ended: data that weren't there by then can't be read")
                layers.append(self.layers.retake(plain, watching))
                keys.append(plain)
                self._renew(layers[-1])
            if not stands:
                self.sandboxes.resume(sandbox.id, layers)
            self._stand(sandbox, keys)

    def _mountable_again(self, digest: str, variant: str, guards: Mapping[str, Guards]) -> tuple[str, Guards | None]:
        """How to mount a layer that isn't: as it was, or, where that isn't to be had any more, in another way.

        Never recorded: its recording ended when it was unmounted, or with who knew of it.

        Raises:
            UnavailableError: nobody would answer for data that are missing.
        """
        if variant == DIRECT:
            raise UnavailableError(
                f"layer sha256:{digest} was mounted from a store; only its store could mount it again"
            )
        watching = guards.get(variant) or next(iter(guards.values()), None)
        if watching is not None:
            return join_key(digest, watching.backend.variant), watching
        if self.layers.missing(digest):
            raise UnavailableError(f"layer sha256:{digest} lacks data, and this machine can't load lazily any more")
        return digest, None

    def suspend(self) -> dict[str, list[Holder]]:
        """Unmount what needs somebody to answer for missing data, keeping uppers; what is whole is left standing.

        Returns:
            who uses a sandbox, by id, so that it could not be unmounted. Then nobody may stop answering.
        """
        needing = [
            sandbox
            for sandbox in self.sandboxes.list()
            if sandbox.stands and self.layers.needs_answers(sandbox.state.mounts)
        ]
        busy = self.sandboxes.busy([sandbox.id for sandbox in needing])
        for sandbox in needing:
            if sandbox.id in busy:
                continue
            try:
                self.sandboxes.suspend(sandbox.id, holders=())
            except ConflictError:  # somebody came since we looked
                busy[sandbox.id] = self.sandboxes.busy([sandbox.id]).get(sandbox.id, [])
                continue
            with self._lock:
                self._suspended.append(sandbox)
            if any(map(is_recorded, sandbox.state.mounts)):
                self._recorded.ended(sandbox.id, unmounted=True)
            self._fall(sandbox.id)
        return busy

    def resume(self, guards: Mapping[str, Guards]) -> dict[str, str]:
        """Mount again what :meth:`suspend` has unmounted; what went wrong, by id."""
        with self._lock:
            suspended, self._suspended = self._suspended, []
        troubled = {}
        for sandbox in suspended:
            try:
                self._take_again(sandbox, guards)
            except ImgtoolError as error:
                troubled[sandbox.id] = str(error)
        return troubled

    # --- who waits

    def observe(
        self, pid: int, pack: CachedPack, frames: range, seconds: float, error: ImgtoolError | None
    ) -> str | None:
        """Note that process ``pid`` waited for these frames; the sandbox that it runs in, if it is one."""
        id = self._sandbox_of(pid)
        with self._lock:
            if id is None or id not in self._standing:
                return None
            demanded = self._demanded.setdefault(id, Demanded())
            demanded.events += 1
            demanded.waited += seconds
            if error is None:
                demanded.frames += len(frames)
                demanded.bytes += sum(pack.index.raw_range(number)[1] for number in frames)
            else:
                demanded.failed += len(frames)
        self._recorded.waited(id, seconds)
        return id

    def demanded(self, id: str) -> Demanded:
        with self._lock:
            return replace(self._demanded.get(id, Demanded()))

    def is_served(self, sandbox: Sandbox) -> bool:
        """Whether the recorder that it is read through is there; True where there is none."""
        return self._recorded.adopt(sandbox.id, sandbox.state.mounts)

    def prefetched(self, id: str, known: dict[Replay, ReplayStats] | None = None) -> dict[str, Any] | None:
        """What was fetched ahead for a sandbox, see :meth:`PlannedStart.document`; None: nothing by this process."""
        with self._lock:
            standing = self._standing.get(id)
        return None if standing is None or standing.planned is None else standing.planned.document(known)

    def _sandbox_of(self, pid: int) -> str | None:
        """By the file system that is the process's root, or holds its working directory."""
        for link in ("root", "cwd"):
            try:
                device = os.stat(f"/proc/{pid}/{link}").st_dev
            except OSError:
                return None  # it has ended
            id = self._by_device.get(device)
            if id is not None:
                return id
        return self._recorded.reader(pid)

    # --- the end

    def close(self, *, clean: bool = True) -> None:
        """Stop fetching, make what was fetched durable, and let the root go."""
        self.planned.close()
        self.fetcher.close()
        self._recorded.close()
        self.cache.close(clean=clean)
        self.stores.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _make_room(self, wanted: int, keep: str) -> int:
        return self.cache.make_room(wanted, keep=(keep,))

    @contextmanager
    def _held(self) -> Iterator[list[str]]:
        """The keys of layers that are held; those in it at the end of the block are given back."""
        keys: list[str] = []
        try:
            yield keys
        finally:
            for key in keys:
                self.layers.give_back(key)


def _receipt(way: Way) -> Mapping[str, object]:
    return {"backend": way.backend, "why": way.why}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
