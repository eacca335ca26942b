"""Sandboxes: a stack of layers with an upper of its own, standing at ``<root>/sandboxes/<id>/rootfs``.

::

    <root>/sandboxes/<id>/
        state.json      the commit: written last, removed first       (format)
        state.new       on its way to that name
        upper/ work/    what is written in the sandbox; absent when read-only
        empty/          the topmost lower of a read-only one
        scratch.img, scratch/{upper,work}   instead of upper and work, with --scratch
        rootfs/         the overlay
        runs/           what runs in it now                           (runs)

Whoever changes a sandbox holds flock on its directory. So at any time a directory is one of: locked (somebody is at
it), with state.json (a sandbox, standing or not), or a leftover that :meth:`Sandboxes.recover` clears. The order of
removal makes every crash one of these: state.json, runs, overlay, layers, scratch, files, directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    MalformedError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    from_os_error,
    os_errors,
    printable,
)
from overlay import mountinfo, runs
from overlay.deletion import remove_tree
from overlay.detached import DetachedCopy
from overlay.format import MAX_SIZE, SandboxState, chain_of
from overlay.holders import Holder, holders_by_device, holders_of
from overlay.layerkey import is_key
from overlay.layers import USER, LayerMounts, Leftover, MountableLayer
from overlay.mountapi import MNT_DETACH, umount
from overlay.overlayfs import check_filesystem, mount_overlay
from overlay.privilege import require_root
from overlay.scratch import create_scratch, remove_scratch, stray_loops, unmount_all

if TYPE_CHECKING:
    from overlay.recording.recordings import RecordedTrace

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox as it was created. ``directory`` and ``rootfs`` are absolute paths."""

    state: SandboxState
    directory: str

    @property
    def id(self) -> str:
        return self.state.id

    @property
    def rootfs(self) -> str:
        return self.directory + "/rootfs"

    @property
    def upper(self) -> str | None:
        """Where writes go, as the host sees it; None when read-only."""
        return _writable(self.directory, self.state)[0]

    @property
    def stands(self) -> bool:
        """Whether the root filesystem is mounted now, which the kernel is asked."""
        try:
            with os_errors(f"look at sandbox {self.id}"):
                return os.stat(self.rootfs).st_dev != os.stat(self.directory).st_dev
        except NotFoundError:
            return False

    def to_json(self) -> dict[str, object]:
        state = self.state
        return {
            "id": state.id,
            "rootfs": self.rootfs,
            "mode": state.mode,
            "receipt": dict(state.receipt),
            "image": dict(state.image),
            "layers": [f"sha256:{digest}" for digest in state.layers],
            "chain": state.chain,
            "read_only": state.read_only,
            "scratch": state.scratch,
            "upper": self.upper,
            "created": state.created,
        }


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a sandbox met.

    Attributes:
        id: the sandbox.
        existed: False when there was nothing to remove.
        stopped: runs that were killed.
        holders: processes that still used its files, so that the mount was detached instead of unmounted: it and
            the disk space go when they end.
        trace: of what it read, that ended with it.
    """

    id: str
    existed: bool
    stopped: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    trace: RecordedTrace | None = None


@dataclass(frozen=True, slots=True)
class _RootAttributes:
    """Attributes of a layer's root directory.

    The root of an overlay shows those of its upper, so a new upper takes over what the topmost layer says.
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, directory: str) -> _RootAttributes:
        status = os.stat(directory)
        xattrs = tuple(
            (name, os.getxattr(directory, name))
            for name in os.listxattr(directory)
            if not name.startswith("trusted.overlay.")
        )
        return cls(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, xattrs)

    def apply(self, directory: str) -> None:
        if self.uid or self.gid:
            os.chown(directory, self.uid, self.gid)
        os.chmod(directory, self.mode)
        for name, value in self.xattrs:
            os.setxattr(directory, name, value)
        os.utime(directory, ns=(self.mtime_ns, self.mtime_ns))


class Sandboxes:
    """The sandboxes of one node root. Any number of processes and threads may use it at once."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)  # as mountinfo names it
        self.layers = LayerMounts(self.root)
        self._directory = os.path.join(self.root, "sandboxes")
        self._roots: dict[str, _RootAttributes] = {}

    def create(
        self,
        layers: Sequence[MountableLayer],
        *,
        image: Mapping[str, object],
        mode: str,
        id: str | None = None,
        read_only: bool = False,
        scratch: int | None = None,
        receipt: Mapping[str, object] | None = None,
    ) -> Sandbox:
        """Mount a new sandbox over ``layers``, bottom first.

        Args:
            layers: what the cache has ready; at least one.
            image: name and digests, kept for ``list``.
            mode: how the data of the layers are reached, kept for ``list``.
            id: its name, ``[a-z0-9][a-z0-9._-]{0,62}``; None makes one up.
            read_only: nothing can be written, and there is no upper.
            scratch: bytes that the upper may take; None: what the node's filesystem has.
            receipt: kept with the sandbox and given back.

        Raises:
            UsageError: a bad id, no layers, scratch of a read-only sandbox.
            ConflictError: the id is taken.
            PermissionError_: not root.
            And what mounting raises; nothing stays behind then.
        """
        require_root()
        if not layers:
            raise UsageError("a sandbox needs at least one layer")
        if len({layer.digest for layer in layers}) != len(layers):
            raise UsageError("a layer is named twice; every layer of a stack is there once")
        if read_only and scratch is not None:
            raise UsageError("--scratch bounds what is written, and a read-only sandbox takes no writes")
        name = new_id() if id is None else _checked(id)
        digests = tuple(layer.digest for layer in layers)
        keys = tuple(layer.key for layer in layers)
        state = SandboxState(
            id=name,
            created=int(time.time()),
            boot=self._boot_id,
            mode=mode,
            read_only=read_only,
            scratch=scratch,
            layers=digests,
            chain=chain_of(digests),
            image=image,
            receipt=receipt or {},
            mounts=keys,
        )
        encoded = _encoded(state)
        directory = f"{self._directory}/{name}"
        with os_errors(f"create sandbox {name}"), self._claimed(name, directory) as fd:
            try:
                os.mkdir(directory + "/rootfs", 0o755)
                if read_only:
                    os.mkdir(directory + "/empty")
                elif scratch is not None:
                    create_scratch(directory, scratch)
                else:
                    os.mkdir(directory + "/upper")
                    os.mkdir(directory + "/work", 0o700)
                self._mount(state, directory, layers, new=True)
                _publish(fd, encoded)
            except BaseException:
                self._clear(fd, directory, name, keys)
                raise
        return Sandbox(state, directory)

    def resume(self, id: str, layers: Sequence[MountableLayer]) -> Sandbox:
        """Mount a sandbox again that has lost its mounts but not its upper: after :meth:`suspend`, or a stray umount.

        The layers may be mounted in other variants than before; the state says which from then on.

        Raises:
            ConflictError: ``layers`` are not those that its upper was written over, or the machine has been
                restarted since, so that the upper may lack what was written last.
            NotFoundError: no such sandbox.
        """
        require_root()
        with self._held(id, "resume") as (fd, sandbox):
            state = sandbox.state
            chain = chain_of(layer.digest for layer in layers)
            if chain != state.chain:
                raise ConflictError(
                    f"the upper of sandbox {id} was written over layers {state.chain} and can't be used over {chain}"
                )
            if state.boot != self._boot_id and not state.read_only:
                raise ConflictError(
                    f"sandbox {id} is from before the machine's last start, and what it wrote was never synced; "
                    f"remove it with `imgtool down {id}`"
                )
            if sandbox.stands:
                return sandbox
            keys = tuple(layer.key for layer in layers)
            for key in set(state.mounts).difference(keys):
                self.layers.detach(key, id)
            if keys != state.mounts:  # before they are attached: what the state names is what removing lets go
                state = replace(state, mounts=keys)
                _publish(fd, _encoded(state))
            _renew_work(sandbox.directory, state)
            self._mount(state, sandbox.directory, layers, new=False)
            return Sandbox(state, sandbox.directory)

    def busy(self, ids: Collection[str]) -> dict[str, list[Holder]]:
        """Who uses the root filesystems of these sandboxes, by id; those that nobody uses are left out.

        One look at all of /proc, however many sandboxes. Processes in other mount namespaces count.
        """
        devices: dict[int, str] = {}
        for id in ids:
            directory = f"{self._directory}/{_checked(id)}"
            with os_errors(f"look at sandbox {id}"):
                try:
                    device = os.stat(directory + "/rootfs").st_dev
                    if device != os.stat(directory).st_dev:
                        devices[device] = id
                except FileNotFoundError:
                    pass
        return {devices[device]: holders for device, holders in holders_by_device(devices).items()}

    def suspend(self, id: str, *, holders: Sequence[Holder] | None = None, force: bool = False) -> list[Holder]:
        """Unmount a sandbox and leave its layers, but keep its state and upper: :meth:`resume` brings it back.

        With ``scratch``, the filesystem of its upper stays mounted. One that doesn't stand only leaves its layers.

        Args:
            id: of the sandbox.
            holders: what :meth:`busy` has just said of it; None: it is asked.
            force: detach what is busy. Its holders go on reading and writing through the mount that they have, and
                while they live the sandbox must not be resumed: overlayfs doesn't allow two mounts of one upper.

        Returns:
            Those holders.

        Raises:
            ConflictError: somebody uses it, or something is mounted in it; it stands as before.
            NotFoundError: no such sandbox.
        """
        require_root()
        with self._held(id, "suspend") as (_, sandbox):
            # Asked before: the kernel finds nothing busy where only another mount namespace has a copy of the mount.
            found = list(self.busy([id]).get(id, ()) if holders is None else holders)
            if found and not force:
                raise ConflictError(f"sandbox {id} is in use by {', '.join(map(str, found[:5]))}; stop them first")
            if sandbox.stands:
                try:
                    umount(sandbox.rootfs)
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    found = found or holders_of(os.stat(sandbox.rootfs).st_dev)
                    if not force:
                        who = ", ".join(map(str, found[:5])) or "something that is mounted in it"
                        raise ConflictError(f"sandbox {id} is in use by {who}; stop or unmount that first") from error
                unmount_all(sandbox.rootfs)
            for key in dict.fromkeys(sandbox.state.mounts):
                self.layers.detach(key, id)
            return found

    def update_receipt(self, id: str, receipt: Mapping[str, object]) -> Sandbox:
        """Replace the receipt of a sandbox, atomically.

        Raises:
            UsageError: it is too large.
            NotFoundError: no such sandbox.
        """
        require_root()
        with self._held(id, "write the receipt of") as (fd, sandbox):
            state = replace(sandbox.state, receipt=receipt)
            _publish(fd, _encoded(state))
            return Sandbox(state, sandbox.directory)

    def get(self, id: str) -> Sandbox:
        """The sandbox ``id``.

        Raises:
            NotFoundError: no such sandbox.
            MalformedError, UnsupportedError: its state.json is damaged or of another release.
        """
        directory = f"{self._directory}/{_checked(id)}"
        try:
            with open(directory + "/state.json", "rb", buffering=0) as stream:
                text = stream.read(MAX_SIZE + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"no sandbox {id}; `imgtool ps` lists them") from None
        except OSError as error:
            raise from_os_error(error, f"read state of sandbox {id}") from error
        state = SandboxState.from_bytes(text)
        if state.id != id:
            raise MalformedError(f"state of sandbox {id} is that of {printable(state.id)}")
        return Sandbox(state, directory)

    def check_free(self, id: str) -> None:
        """Raises UsageError: a bad id; ConflictError: it is taken at this moment."""
        if self._exists(_checked(id)):
            raise ConflictError(f"sandbox {id} exists; remove it or choose another id")

    def stands(self, sandbox: Sandbox) -> bool:
        """Whether its root filesystem is mounted now."""
        return sandbox.stands

    def remove(self, id: str) -> Removal:
        """Stop what runs in the sandbox, unmount and delete it. A sandbox that is gone, or half gone, is fine.

        Processes that hold files of it open don't stop this: they are reported and the mount is detached.

        Raises:
            UsageError: a bad id.
            PermissionError_: not root.
            UnavailableError: the kernel or a runtime refuses; calling again goes on where it stopped.
        """
        require_root()
        directory = f"{self._directory}/{_checked(id)}"
        with os_errors(f"remove sandbox {id}"), self._locked(directory) as fd:
            if fd is None:
                return Removal(id, existed=False)
            try:
                keys: tuple[str, ...] | None = self.get(id).state.mounts
            except ImgtoolError:  # no state, or one that can't be read: ask every layer
                keys = None
            try:
                os.unlink("state.json", dir_fd=fd)
            except FileNotFoundError:
                pass
            return self._clear(fd, directory, id, keys)

    def recover(self) -> list[Leftover]:
        """Find and clear what crashes left: parts of sandboxes, users of layers, mounts and loop devices.

        Sandboxes that exist but have lost their mounts are reported and kept. What somebody is at this moment making
        or removing is left alone. It reads all of mountinfo and is not for every call.

        Raises:
            PermissionError_: not root.
            UnavailableError: something could not be cleared.
        """
        require_root()
        found: list[Leftover] = []
        with os_errors(f"recover {printable(self.root)}"):
            for name in self._names():
                found += self._recover_one(name)
            found += self.layers.sweep(self._exists)
            mounts = mountinfo.read()
            for mount in [*mountinfo.below(self._directory, mounts), *mountinfo.below(self.root + "/layers", mounts)]:
                path = os.fsdecode(mount.target)
                if not self._owns(path):
                    unmount_all(path)
                    found.append(Leftover("mount", path, "unmounted"))
            devices = {mount.device for mount in mounts}
            for device in stray_loops(self._directory, devices):
                found.append(Leftover("loop device", device, "freed"))
        return found

    def _recover_one(self, name: str) -> list[Leftover]:
        directory = f"{self._directory}/{name}"
        if not USER.fullmatch(name):
            return [Leftover("unknown name", directory, "kept: not made by imgtool")]
        with self._locked(directory, wait=False) as fd:
            if fd is None:
                return []
            try:
                sandbox = self.get(name)
            except NotFoundError:
                self._clear(fd, directory, name, None)
                return [Leftover("part of a sandbox", directory, "removed")]
            except ImgtoolError as error:
                return [Leftover("sandbox", directory, f"kept: {error}; `imgtool down {name}` removes it")]
            if sandbox.stands:
                return []
            return [Leftover("sandbox", directory, f"kept: not mounted; `imgtool down {name}` removes it")]

    def _mount(self, state: SandboxState, directory: str, layers: Sequence[MountableLayer], *, new: bool) -> None:
        lowers = [self.layers.attach(layer, state.id) for layer in layers]
        upper, work = _writable(directory, state)
        if new:
            self._root_attributes(layers[-1].digest, lowers[-1]).apply(upper or directory + "/empty")
        mount_on_rootfs = partial(
            mount_overlay,
            lowers,
            target=directory + "/rootfs",
            empty=directory + "/empty",
            read_only=state.read_only,
            volatile=True,
            checked=True,
        )
        detached = self._detached if upper is not None and state.scratch is None else None
        places = [(upper, work)]
        if detached is not None:
            places.insert(0, (detached.path(state.id + "/upper"), detached.path(state.id + "/work")))
        try:
            mount_on_rootfs(*places[0])
            return
        except ImgtoolError:
            # A kernel that takes no uppers from detached mounts, or a layer that was mounted anew after we looked; any
            # other reason comes up again.
            pass
        with self.layers.held(layer.key for layer in layers):
            for place in places:
                _renew_work(directory, state)
                try:
                    mount_on_rootfs(*place)
                except ImgtoolError:
                    if place is places[-1]:
                        raise
                    self._detached = None
                    continue
                return

    def _clear(self, fd: int, directory: str, name: str, keys: tuple[str, ...] | None) -> Removal:
        """Everything of a sandbox without state.json; its lock is held. ``keys`` of its layers; None: not known."""
        stopped = runs.stop_all(directory)
        holders = _unmount(directory + "/rootfs")
        for key in self.layers.mounted() if keys is None else dict.fromkeys(keys):
            self.layers.detach(key, name)
        if os.path.lexists(directory + "/scratch"):
            remove_scratch(directory)
        remove_tree(fd, b"upper")
        remove_tree(fd, b"work")
        remove_tree(fd, b"rootfs")
        try:
            os.rmdir(directory)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            parent = os.open(self._directory, _DIRECTORY)
            try:
                remove_tree(parent, os.fsencode(name))
            finally:
                os.close(parent)
        return Removal(name, existed=True, stopped=tuple(stopped), holders=tuple(holders))

    def _root_attributes(self, digest: str, mount_point: str) -> _RootAttributes:
        found = self._roots.get(digest)
        if found is None:
            if len(self._roots) >= 1024:
                self._roots.clear()
            found = self._roots[digest] = _RootAttributes.of(mount_point)
        return found

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._directory))
        except FileNotFoundError:
            return []

    def _exists(self, name: str) -> bool:
        return os.path.isdir(f"{self._directory}/{name}")

    def _owns(self, path: str) -> bool:
        """Whether a mount at ``path`` belongs to a sandbox or layer: one that exists, or is being made or removed.

        One without a directory has been removed since it was listed. What is there now may be another's.
        """
        kind, _, rest = path.removeprefix(self.root + "/").partition("/")
        name, _, inner = rest.partition("/")
        if kind == "layers":  # those that are there are sweep's, which looks under their lock
            return is_key(name) and inner == "mnt"
        return not self._exists(name) or inner.partition("/")[0] in ("rootfs", "scratch")

    @cached_property
    def _boot_id(self) -> str:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()

    @cached_property
    def _detached(self) -> DetachedCopy | None:
        """Where uppers are taken from, if the kernel lets us."""
        try:
            return DetachedCopy(self._directory)
        except OSError:
            return None

    @cached_property
    def _prepared(self) -> bool:
        """Once per process: the directory for sandboxes is there and can hold uppers."""
        os.makedirs(self._directory, 0o700, exist_ok=True)
        check_filesystem(self._directory)
        return True

    @contextmanager
    def _claimed(self, name: str, directory: str) -> Iterator[int]:
        """Make the sandbox's directory and hold its lock; yields its descriptor."""
        assert self._prepared
        while True:
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                if os.path.lexists(directory + "/state.json"):
                    raise ConflictError(f"sandbox {name} exists; remove it or choose another id") from None
                raise ConflictError(
                    f"sandbox {name} is being made or removed, or was left by a crash (`imgtool down {name}` clears it)"
                ) from None
            with self._locked(directory) as fd:
                if fd is not None:
                    if os.listdir(fd):  # that of somebody who has made it anew since ours was removed
                        raise ConflictError(f"sandbox {name} exists; remove it or choose another id")
                    yield fd
                    return
            # recovery took the new directory for a leftover in the moment before it was locked

    @contextmanager
    def _held(self, id: str, what: str) -> Iterator[tuple[int, Sandbox]]:
        """Hold the lock of a sandbox that exists; yields its directory's descriptor, and what its state is now."""
        directory = f"{self._directory}/{_checked(id)}"
        with os_errors(f"{what} sandbox {id}"), self._locked(directory) as fd:
            if fd is None:
                raise NotFoundError(f"no sandbox {id}; `imgtool ps` lists them")
            yield fd, self.get(id)

    @contextmanager
    def _locked(self, directory: str, *, wait: bool = True) -> Iterator[int | None]:
        """Hold a sandbox's lock; None when it doesn't exist (any more), or with ``wait=False`` is taken."""
        try:
            fd = os.open(directory, _DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            yield fd if os.fstat(fd).st_nlink else None
        finally:
            os.close(fd)

    def list(self) -> list[Sandbox]:
        """All sandboxes by id. What isn't whole (half made, half removed, an unreadable state) is :meth:`recover`'s."""
        found = []
        with os_errors(f"list sandboxes of {printable(self.root)}"):
            names = self._names()
        for name in filter(USER.fullmatch, names):
            try:
                found.append(self.get(name))
            except (NotFoundError, MalformedError, UnsupportedError):
                pass
        return found


def new_id() -> str:
    """A name that no other sandbox has, as good as certainly."""
    return secrets.token_hex(6)


def _checked(id: str) -> str:
    if not USER.fullmatch(id):
        raise UsageError(
            f"not a sandbox id: {printable(id)!r}; it takes 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "and starts with a letter or digit"
        )
    return id


def _writable(directory: str, state: SandboxState) -> tuple[str, str] | tuple[None, None]:
    if state.read_only:
        return None, None
    base = directory + "/scratch" if state.scratch is not None else directory
    return base + "/upper", base + "/work"


def _renew_work(directory: str, state: SandboxState) -> None:
    """A volatile overlay marks its work directory, even one whose mount failed; the kernel wants a new one then."""
    work = _writable(directory, state)[1]
    if work is not None:
        parent = os.open(os.path.dirname(work), _DIRECTORY)
        try:
            remove_tree(parent, b"work")
            os.mkdir("work", 0o700, dir_fd=parent)
        finally:
            os.close(parent)


def _encoded(state: SandboxState) -> bytes:
    encoded = state.to_bytes()
    if len(encoded) > MAX_SIZE:
        raise UsageError(f"image and receipt of sandbox {state.id} take more than {MAX_SIZE} bytes")
    return encoded


def _publish(fd: int, text: bytes) -> None:
    """state.json appears, or changes, as a whole or not at all. Not synced: it means nothing after a restart."""
    # Not O_EXCL: one that a killed writer left is overwritten; the sandbox's lock keeps others out.
    new = os.open("state.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        try:
            written = os.write(new, text)
            if written != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state.json")
        finally:
            os.close(new)
        os.rename("state.new", "state.json", src_dir_fd=fd, dst_dir_fd=fd)
    except OSError:
        os.unlink("state.new", dir_fd=fd)
        raise


def _unmount(rootfs: str) -> list[Holder]:
    """Unmount the overlay; who is in the way of that, in which case it is detached."""
    try:
        device = os.stat(rootfs).st_dev
        umount(rootfs)
        holders: list[Holder] = []
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno == errno.EINVAL:
            return []  # not mounted
        if error.errno != errno.EBUSY:
            raise
        holders = holders_of(device)
        umount(rootfs, MNT_DETACH)
    unmount_all(rootfs)
    return holders
