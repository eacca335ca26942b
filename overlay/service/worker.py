"""The worker: cache, fetcher, sandboxes and the API. When it dies, the holder starts another one with what it holds."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError
from overlay.lazy.choice import choose_backend, fuse_works
from overlay.lazy.custody import Custody
from overlay.lazy.demand import Demand
from overlay.lazy.guards import FanotifyBackend, FuseBackend, Guards
from overlay.lazy.holdings import Holdings
from overlay.lazy.rendezvous import FUSE, KEEPER
from overlay.node import Node
from overlay.service.log import log
from overlay.service.metrics import Metrics
from overlay.service.notify import ServiceManager
from overlay.service.options import NodeOptions
from overlay.service.server import ApiServer
from overlay.service.service import Service
from prefetch.fetcher import Priority

FANOTIFY = "fanotify"


def run(
    root: str,
    run_directory: str,
    options: NodeOptions,
    holdings: Holdings,
    orphaned: Callable[[Holdings], None],
) -> None:
    """Serve until the service is stopped. ``orphaned`` starts a holder when holder and keeper are gone."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # of the lease by which the cache asks who has a file open
    Worker(root, run_directory, options, holdings, orphaned).run()


class Worker:
    """Puts the parts together."""

    def __init__(
        self,
        root: str,
        run_directory: str,
        options: NodeOptions,
        holdings: Holdings,
        orphaned: Callable[[Holdings], None],
    ) -> None:
        self._holdings = holdings
        self._orphaned = orphaned
        self._held = frozenset(holdings.packs)
        self._manager = ServiceManager(options.notify_socket) if options.notify_socket else None
        self.metrics = Metrics()
        self._node = Node(
            root,
            limit=options.limit,
            threads=options.threads,
            bandwidth=options.prefetch_bandwidth,
            held=dict(holdings.packs),
            observer=_Observer(self.metrics),
            warn=lambda text: log("damage", level="warning", what=text),
        )
        for fds in holdings.packs.values():  # the cache has copies: those that were inherited would keep evicted packs
            for fd in fds:
                os.close(fd)
        self._restored = threading.Event()
        self._demand = Demand(self._node.fetcher, self._node.cache.known, self._observe)
        self._custody = Custody(
            run_directory,
            on_peer=self._demand.attach,
            on_lost=self._lost,
            on_stop=self._asked_to_stop,
            orphaned=self._without_holder,
            log=log,
        )
        self._guards = self._make_guards(run_directory)
        self._service = Service(
            self._node,
            options,
            self._guards,
            preferred=choose_backend(root),
            processes=self._processes,
            events=self._events,
            metrics=self.metrics,
            log=log,
        )
        listening = socket.socket(fileno=os.dup(holdings.listening))
        self._server = ApiServer(self._service, listening, observe=self.metrics.observe_request)
        self._service.on_stopped = self._server.shutdown

    def run(self) -> None:
        """Answer readers at once, then find sandboxes, then listen."""
        self._service.restore(sorted(self._held))
        self._restored.set()
        log("ready", unclean=self._node.cache.unclean, held=len(self._held))
        if self._manager is not None:
            self._manager.tell(READY="1", STATUS="answers readers and requests")
        self._server.serve()
        self._service.close()
        try:
            self._node.close()
        except ImgtoolError as error:  # what isn't durable is verified when it is read next
            log("cache not closed in order", level="error", error=str(error))
        self._custody.stopped()

    def _make_guards(self, run_directory: str) -> dict[str, Guards]:
        guards = {}
        if self._holdings.group is not None:
            guards[FANOTIFY] = Guards(FanotifyBackend(self._custody))
        if fuse_works() is None:
            guards[FUSE] = Guards(FuseBackend(self._custody, f"{run_directory}/packs"))
        for name, front in ((FANOTIFY, KEEPER), (FUSE, FUSE)):
            if name in guards:
                guards[name].adopt(self._known(self._holdings.of(front)))
        return guards

    def _known(self, packs: Mapping[str, object]) -> list[CachedPack]:
        found = []
        for hex in packs:
            try:
                found.append(self._node.cache.known(hex))
            except ImgtoolError as error:
                log("held pack can't be used", level="error", pack=hex, error=str(error))
        return found

    def _observe(self, pid: int, pack: CachedPack, frames: range, seconds: float, error: ImgtoolError | None) -> None:
        sandbox = self._node.observe(pid, pack, frames, seconds, error)
        self.metrics.observe_demand(seconds, "ok" if error is None else "failed")
        log(
            "read waited" if error is None else "read failed",
            level="debug" if error is None else "warning",
            sandbox=sandbox,
            pid=pid,
            pack=pack.hex[:12],
            first=frames.start,
            count=len(frames),
            ms=round(seconds * 1000, 2),
            error=None if error is None else str(error),
        )

    def _processes(self) -> Mapping[str, Any]:
        try:
            status = self._custody.status()
        except ImgtoolError as error:
            return {"pids": {"worker": os.getpid()}, "restarts": {}, "holder": str(error)}
        return {"pids": status["pids"], "restarts": status["restarts"]}

    def _events(self) -> Mapping[str, Any]:
        """What the keeper has counted."""
        return {name: value for name, value in self._demand.stats(KEEPER).items() if name != "stats"}

    def _lost(self, front: str) -> None:
        self._restored.wait()
        log("lost", level="error", front=front)
        self._demand.detach(front)
        self._service.lost(front)

    def _asked_to_stop(self) -> None:
        threading.Thread(target=self._stop, name="asked-to-stop", daemon=True).start()

    def _stop(self) -> None:
        self._restored.wait()  # else what is mounted again after this would have nobody who answers
        try:
            self._service.stop(force=True)
        except ImgtoolError as error:
            log("can't stop", level="error", error=str(error))

    def _without_holder(self) -> None:
        packs = {}
        fronts: dict[str, set[str]] = {}
        for name, front in ((FANOTIFY, KEEPER), (FUSE, FUSE)):
            for pack in self._guards[name].packs() if name in self._guards else ():
                packs[pack.hex] = (pack.data_fd, pack.frames.fd)
                fronts.setdefault(pack.hex, set()).add(front)
        held = self._holdings
        self._orphaned(Holdings(held.lock, held.listening, held.group, held.journal, packs, fronts))


class _Observer:
    """What the fetcher tells, for metrics and the log."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def fetched(self, pack: CachedPack, numbers: Sequence[int], priority: Priority, seconds: float, size: int) -> None:
        self._metrics.observe_fetch(priority.name.lower(), seconds)
        log(
            "fetched",
            level="debug",
            pack=pack.hex[:12],
            first=numbers[0],
            count=len(numbers),
            priority=priority.name.lower(),
            bytes=size,
            ms=round(seconds * 1000, 2),
        )

    def failed(self, pack: CachedPack, numbers: Sequence[int], error: ImgtoolError) -> None:
        log("fetch failed", level="warning", pack=pack.hex[:12], frames=list(numbers), error=str(error))
