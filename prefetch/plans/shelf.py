"""Plans on a node: by name for people, by layer for whoever starts a sandbox.

::

    plans/NAME.json             saved by somebody
    plans/layers/<hex>.json     what a store said of a layer: its plan
    plans/layers/<hex>.none     … or that it has none, when the file was made

Files are replaced whole, by rename, and durable once they are saved. Nothing is locked: the last one wins. Times are of
this machine's file system. Which files there are, and of which layers, is in memory, and so are the plans that were
asked for last.
"""

from __future__ import annotations

import math
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from layerstore import staging
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, NotFoundError, UsageError, from_os_error, os_errors, printable
from layerstore.store.names import check_name
from prefetch.plans.format import PLAN_BYTES, Plan, PlanPart, encode_plan, number, parse_plan

DIRECTORY = "plans"
LAYERS = "layers"
SUFFIX = ".json"
NONE_SUFFIX = ".none"
RESERVED = frozenset({"auto", "none"})
"""What stands for no plan where a plan is chosen."""
NAME_BYTES = 250
"""Longest name: with its suffix it fits into a file name."""

NONE_SECONDS = 3_600.0
"""For so long a store that had no plan for a layer isn't asked again."""
KEPT_SECONDS = 86_400.0
"""After so long the store is asked again whether it has a better one; the kept one is used meanwhile."""

CHECK_SECONDS = 1.0
"""A directory whose time hasn't changed is looked through again after this: two changes can be made within a tick of
the file system's clock, and a file that is written in place changes no directory."""

NEAR = 0.5
"""Share of what is planned of a layer that lies in an image's packs, from which it is taken for another build of one of
the image's layers. Point releases share nine tenths; layers of different things share what their base has, too."""

RANGES_IN_MEMORY = 200_000
"""Of all plans together; a range takes about 300 bytes. The plans asked for last stay."""

KEPT_FILES = 1_000
"""Plans kept from stores: of more layers than this the oldest are removed, and asked for again when they are wanted."""

LEFTOVER_SECONDS = 3_600.0
"""Temporary files of dead writers are removed after this."""

_HEX = re.compile(r"(?:[0-9a-f]{64}|[0-9a-f]{128})")
_SHA512_LENGTH = 128
_Signature = tuple[int, int, int]


@dataclass(slots=True)
class _File:
    """A plan on disk.

    Attributes:
        signature: modification time in ns, inode and size: the file is read again when one of them changes.
        layers: that it has ranges for; empty if it is damaged. Of a kept plan that hasn't been read: its layer.
        gap: share of the gap between cold and warm that it closes by its score; None if nothing is said.
        problem: why it can't be used.
        read: the others say what is in the file.
        planned: of each layer, planned bytes by pack.
    """

    path: str
    signature: _Signature
    layers: frozenset[Digest]
    gap: float | None
    problem: str | None = None
    read: bool = False
    planned: Mapping[Digest, Mapping[Digest, int]] = field(default_factory=dict)


class Shelf:
    """The plans below ``root``. From any thread.

    Args:
        root: of the node; directories are made when something is saved.
        now: seconds since 1970, as file systems count them.
        monotonic: seconds, for :data:`CHECK_SECONDS`.
    """

    def __init__(
        self,
        root: str,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = os.path.join(root, DIRECTORY)
        self._layers = os.path.join(self._directory, LAYERS)
        self._now = now
        self._monotonic = monotonic
        self._mutex = threading.Lock()
        self._named: dict[str, _File] = {}
        self._kept: dict[Digest, _File] = {}
        self._none: dict[Digest, float] = {}
        self._trouble: list[str] = []
        self._seen: tuple[int, int] | None = None
        self._checked = 0.0
        self._plans: OrderedDict[str, tuple[_Signature, Plan]] = OrderedDict()

    # -- by name -------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Of the plans that somebody saved, sorted; those of damaged ones too."""
        with self._mutex:
            self._look()
            return sorted(self._named)

    def path(self, name: str) -> str:
        """Where a plan of this name is, or would be.

        Raises:
            UsageError: not a valid name: as of references, without a slash, and none of :data:`RESERVED`.
        """
        if name in RESERVED:
            raise UsageError(f"'{name}' can't be the name of a plan: `up --plan {name}` means something else")
        if "/" in check_name(name):
            raise UsageError(f"'{name}' can't be the name of a plan: it has a slash")
        if len(name) > NAME_BYTES:
            raise UsageError(f"'{name}' is longer than the {NAME_BYTES} bytes that a plan's name may have")
        return os.path.join(self._directory, name + SUFFIX)

    def load(self, name: str) -> Plan:
        """A plan by its name.

        Raises:
            NotFoundError: no such plan.
            MalformedError, UnsupportedError, LimitError: the file is no plan that this release reads.
            UsageError: not a valid name.
        """
        path = self.path(name)
        try:
            return read_plan(path)
        except NotFoundError as error:
            raise self._missing(name) from error

    def save(self, plan: Plan) -> str:
        """Save a plan under its own name, instead of the one that has that name; returns the path.

        Raises:
            UsageError: it has no name that a plan may have.
            LimitError, MalformedError: no reader would take it.
            NoSpaceError, PermissionError_, UnavailableError: it can't be written.
        """
        path = self.path(plan.name)
        self._write(path, encode_plan(plan, f"plan {plan.name!r}"))
        return path

    def remove(self, name: str) -> None:
        """Remove a plan.

        Raises:
            NotFoundError: no such plan.
            UsageError: not a valid name.
        """
        path = self.path(name)
        try:
            with os_errors(f"plan {name!r}"):
                os.unlink(path)
                staging.sync_directory(self._directory)
        except NotFoundError as error:
            raise self._missing(name) from error
        self._forget()

    # -- by layer ------------------------------------------------------------------------------------------------------

    def find(self, layers: Sequence[Digest], packs: Iterable[Digest] = ()) -> list[Plan]:
        """The plans for the layers of an image, best first, each layer's ranges from the best plan that has some.

        A plan is better than another if it has ranges for more of the layers, then if it closes more of the gap between
        cold and warm by its own score (one that has none comes last), then if it was saved here rather than kept from a
        store, then by name. Of each plan only the parts are returned that no better one has: fetching what several
        plans for different runs want would be fetching what this run doesn't.

        A layer without a plan may be another build of one that has: then they share ``packs``, which are those of the
        image. So for each such layer at most one part more is returned, of plans saved here, that is for the most part
        about packs which none of the others is about.

        What is damaged is left out; see :meth:`problems`.
        """
        with self._mutex:
            self._look()
            candidates = [(name, 0, file) for name, file in self._named.items()]
            candidates += [(layer.hex, 1, self._kept[layer]) for layer in dict.fromkeys(layers) if layer in self._kept]
            for _, _, file in candidates:
                if not file.read:
                    self._plan(file)
            left = set(layers)
            found: list[Plan] = []
            while left:
                fitting = [each for each in candidates if each[2].layers & left]
                if not fitting:
                    break
                best = min(fitting, key=lambda each: _rank(each[2], left, each[1], each[0]))
                candidates.remove(best)
                plan = self._plan(best[2])
                if plan is None or not best[2].layers & left:
                    continue  # damaged or changed since it was read
                found.append(replace(plan, parts=tuple(part for part in plan.parts if part.metadata in left)))
                left -= best[2].layers
            about = {pack for plan in found for part in plan.parts for pack in part.packs}
            return found + self._near(len(left), set(packs) - about, set(layers))

    def _near(self, most: int, packs: set[Digest], layers: set[Digest]) -> list[Plan]:
        """Parts of plans for other builds: at most so many, the nearest first."""
        found: list[Plan] = []
        while len(found) < most and packs:
            near = [
                (-share, math.inf if file.gap is None else -file.gap, name, layer, file)
                for name, file in self._named.items()
                for layer, planned in file.planned.items()
                if layer not in layers and (share := _share(planned, packs)) >= NEAR
            ]
            if not near:
                break
            *_, layer, file = min(near, key=lambda each: each[:3])
            layers = layers | {layer}
            plan = self._plan(file)
            if plan is None:
                continue  # damaged or changed since it was read
            parts = tuple(part for part in plan.parts if part.metadata == layer)
            found.append(replace(plan, parts=parts))
            packs = packs - {pack for part in parts for pack in part.packs}
        return found

    def keep(self, layer: Digest, plan: Plan | None) -> None:
        """Remember what a store said of a layer: its plan, or that it has none.

        Raises:
            LimitError, MalformedError: no reader would take it.
            NoSpaceError, PermissionError_, UnavailableError: it can't be written.
        """
        kept, none = (os.path.join(self._layers, layer.hex + suffix) for suffix in (SUFFIX, NONE_SUFFIX))
        if plan is None:
            self._write(none, b"")
            stale = kept
        else:
            self._write(kept, encode_plan(plan, f"plan of layer {layer}"))
            stale = none
        with os_errors(f"what is known of layer {layer}"):
            for path in (stale, *self._outdated()):
                with suppress(FileNotFoundError):
                    os.unlink(path)
        self._forget()

    def asked(self, layer: Digest) -> bool:
        """Whether a store has lately been asked about a layer.

        That is for :data:`NONE_SECONDS` where it had no plan, for :data:`KEPT_SECONDS` where it had one.
        """
        with self._mutex:
            self._look()
            return self._asked(layer)

    def unasked(self, layers: Iterable[Digest]) -> list[Digest]:
        """The layers that no plan which was saved here has ranges for, and that no store has lately been asked about.

        So a plan that was kept is found by :meth:`find`, and yet asked for again when it is old.
        """
        with self._mutex:
            self._look()
            covered = frozenset[Digest]().union(*(file.layers for file in self._named.values()))
            return [layer for layer in dict.fromkeys(layers) if layer not in covered and not self._asked(layer)]

    def problems(self) -> list[str]:
        """Why files that are there can't be used, one line each."""
        with self._mutex:
            self._look()
            files = [*self._named.values(), *self._kept.values()]
            return sorted([*self._trouble, *(file.problem for file in files if file.problem is not None)])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _missing(self, name: str) -> NotFoundError:
        return NotFoundError(f"there is no plan {name!r} in {printable(self._directory)}; `imgtool plan ls` lists them")

    def _asked(self, layer: Digest) -> bool:
        now = self._now()
        kept = self._kept.get(layer)
        return _fresh(self._none.get(layer), now, NONE_SECONDS) or (
            kept is not None and _fresh(kept.signature[0] / 1e9, now, KEPT_SECONDS)
        )

    def _write(self, path: str, data: bytes) -> None:
        directory = os.path.dirname(path)
        with os_errors(f"plan {printable(path)}"):
            os.makedirs(os.path.dirname(self._directory), exist_ok=True)
            staging.make_directory(self._directory)
            if directory != self._directory:
                staging.make_directory(directory)
            staging.reclaim_files(directory, int((self._now() - LEFTOVER_SECONDS) * 1e9), dry_run=False)
            staging.write_file(path, data)
        self._forget()

    def _forget(self) -> None:
        with self._mutex:
            self._seen = None

    def _outdated(self) -> list[str]:
        """Files of layers that nothing is lost with."""
        with self._mutex:
            self._look()
            now = self._now()
            none = [layer for layer, at in self._none.items() if not _fresh(at, now, NONE_SECONDS)]
            kept = sorted(self._kept.values(), key=lambda file: file.signature, reverse=True)
        outdated = [os.path.join(self._layers, layer.hex + NONE_SUFFIX) for layer in none]
        return outdated + [file.path for file in kept[KEPT_FILES:]]

    def _entries(self, directory: str) -> list[tuple[str, _Signature]]:
        """The regular files of a directory; what can't be listed is put down as trouble."""
        found = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode):
                            found.append((entry.name, (status.st_mtime_ns, status.st_ino, status.st_size)))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._trouble.append(str(from_os_error(error, f"plans in {printable(directory)} can't be listed")))
        return sorted(found)

    def _look(self) -> None:
        """Bring what is in memory up to date: two system calls where nothing has changed."""
        seen = (_changed(self._directory), _changed(self._layers))
        now = self._monotonic()
        if seen == self._seen and now - self._checked < CHECK_SECONDS:
            return
        self._trouble = []
        named: dict[str, _File] = {}
        for entry, signature in self._entries(self._directory):
            name = entry.removesuffix(SUFFIX)
            if entry.endswith(SUFFIX) and _is_name(name):
                known = self._named.get(name)
                path = os.path.join(self._directory, entry)
                named[name] = known if known and known.signature == signature else self._read(path, signature)
        kept: dict[Digest, _File] = {}
        none: dict[Digest, float] = {}
        for entry, signature in self._entries(self._layers):
            stem, suffix = os.path.splitext(entry)
            if not _HEX.fullmatch(stem):
                continue
            layer = Digest("sha512" if len(stem) == _SHA512_LENGTH else "sha256", stem)
            if suffix == NONE_SUFFIX:
                none[layer] = signature[0] / 1e9
            elif suffix == SUFFIX:
                # Read when it is wanted: there may be one for each layer that this node has ever had.
                file = self._kept.get(layer)
                path = os.path.join(self._layers, entry)
                same = file is not None and file.signature == signature
                kept[layer] = file if file and same else _File(path, signature, frozenset({layer}), None)
        self._named, self._kept, self._none = named, kept, none
        self._seen, self._checked = seen, now

    def _read(self, path: str, signature: _Signature) -> _File:
        file = _File(path, signature, frozenset(), None)
        self._plan(file)
        return file

    def _plan(self, file: _File) -> Plan | None:
        """The plan of a file, from memory where it is there; what the file says is put down in ``file``."""
        known = self._plans.get(file.path)
        if known is not None and known[0] == file.signature:
            self._plans.move_to_end(file.path)
            return known[1]
        try:
            plan = read_plan(file.path)
        except ImgtoolError as error:
            file.layers, file.gap, file.problem, file.planned = frozenset(), None, str(error), {}
            if isinstance(error, NotFoundError):
                file.problem = None  # removed since it was listed
            self._plans.pop(file.path, None)
            return None
        finally:
            file.read = True
        file.layers = frozenset(part.metadata for part in plan.parts if part.ranges)
        file.gap, file.problem = number(plan.score.get("gap_closed")), None
        file.planned = {part.metadata: _planned(part) for part in plan.parts if part.ranges}
        self._plans[file.path] = (file.signature, plan)
        self._plans.move_to_end(file.path)
        left = sum(_ranges(each) for _, each in self._plans.values())
        while left > RANGES_IN_MEMORY and len(self._plans) > 1:
            left -= _ranges(self._plans.popitem(last=False)[1][1])
        return plan


def read_plan(path: str) -> Plan:
    """A plan from a file.

    Raises:
        NotFoundError: no such file.
        MalformedError, UnsupportedError, LimitError: it is no plan that this release reads.
        PermissionError_, UnavailableError: it can't be read.
    """
    with os_errors("reading a plan"):
        data = staging.read_file(path, PLAN_BYTES)
    return parse_plan(data, f"plan {printable(path)}")


def _rank(file: _File, wanted: set[Digest], kept: int, name: str) -> tuple[int, float, int, str]:
    """Smaller is better."""
    return -len(file.layers & wanted), math.inf if file.gap is None else -file.gap, kept, name


def _planned(part: PlanPart) -> dict[Digest, int]:
    """Bytes by pack."""
    found: dict[Digest, int] = {}
    for planned in part.ranges:
        pack = part.packs[planned.device - 1]
        found[pack] = found.get(pack, 0) + planned.length
    return found


def _share(planned: Mapping[Digest, int], packs: set[Digest]) -> float:
    """Of what is planned, how much lies in these packs."""
    return sum(size for pack, size in planned.items() if pack in packs) / sum(planned.values())


def _ranges(plan: Plan) -> int:
    return sum(len(part.ranges) for part in plan.parts)


def _fresh(at: float | None, now: float, seconds: float) -> bool:
    """Whether ``at`` is within the last ``seconds``. In the future: the clock has been set back, so nobody knows."""
    return at is not None and -1 <= now - at < seconds


def _changed(directory: str) -> int:
    """When a directory was changed, ns; 0 where there is none."""
    try:
        return os.stat(directory).st_mtime_ns
    except OSError:
        return 0


def _is_name(name: str) -> bool:
    try:
        return "/" not in check_name(name)
    except UsageError:
        return False
