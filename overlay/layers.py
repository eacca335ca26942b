"""Layers on the node: each mounted once, shared by all its users, released with the last.

::

    <root>/layers/<key>/    <hex of the metadata image>[.<variant>]     (layerkey)
        lock          flock: exclusive to mount, unmount and replace
        mnt/          the EROFS mount; mounted or not is asked of the kernel
        users/<user>  one name per user, a hard link to lock (a name costs no inode)

Arriving is ``link`` and a look whether ``mnt`` is mounted; neither needs the lock. Leaving is ``unlink`` and an attempt
to ``rmdir users``, which only the last one manages; after that ``link`` fails, and arrivals queue at the lock until
the layer is unmounted, then mount it again. A crash at any point leaves names without users or a mount without
names, and :meth:`LayerMounts.sweep` clears both.

A layer may be mounted in several variants at once, which differ in how its packs are reached and not in what is read;
each has a directory and users of its own.

Mounts belong to a mount namespace: all users of a root must live in the same one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from layerstore.errors import NotFoundError, UsageError, from_os_error
from overlay.erofs import mount_erofs
from overlay.layerkey import is_digest, is_key, is_variant, join_key
from overlay.mountapi import MNT_DETACH, AnyPath, umount

USER = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
"""The grammar of users, and of sandbox ids: a file name, never a path, never hidden, never an option."""


@dataclass(frozen=True, slots=True)
class MountableLayer:
    """One layer, and the files that it is mounted from.

    Attributes:
        digest: sha256 of the metadata image, hex.
        image: its path.
        devices: paths of its packs, in the order of its device table.
        variant: how the devices are reached: empty for files of the cache, else see :mod:`overlay.layerkey`.
    """

    digest: str
    image: str
    devices: tuple[str, ...] = ()
    variant: str = ""

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise UsageError(f"not the hex of a sha256 digest: {self.digest!r}")
        if not is_variant(self.variant):
            raise UsageError(f"not a variant of a layer: {self.variant!r}")

    @property
    def key(self) -> str:
        """What its mount is called."""
        return join_key(self.digest, self.variant)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that a crash left and recovery found: what kind of thing, where, and what was done about it."""

    kind: str
    path: str
    action: str


class LayerMounts:
    """The layers mounted below ``<root>/layers``. A ``key`` is that of a :class:`MountableLayer`."""

    def __init__(self, root: str) -> None:
        self._root = os.path.join(root, "layers")
        self._device: int | None = None

    def attach(self, layer: MountableLayer, user: str) -> str:
        """Register ``user`` and return where ``layer`` is mounted. Repeating it changes nothing.

        Raises:
            UsageError: ``user`` breaks the grammar.
            And what :func:`overlay.erofs.mount_erofs` raises; then ``user`` is not registered.
        """
        if not USER.fullmatch(user):
            raise UsageError(f"not a user of layers: {user!r}")
        directory = f"{self._root}/{layer.key}"
        mount_point = directory + "/mnt"
        try:
            if _add_user(directory, user) and self._is_mounted(mount_point):
                return mount_point
            return self._attach_slowly(layer, directory, user)
        except OSError as error:
            raise from_os_error(error, f"attach layer sha256:{layer.key}") from error

    def detach(self, key: str, user: str) -> None:
        """Take ``user`` off the layer and unmount it after the last one. Not attached is fine."""
        if not is_key(key) or not USER.fullmatch(user):
            raise UsageError(f"not a layer and a user: {key!r}, {user!r}")
        directory = f"{self._root}/{key}"
        try:
            try:
                os.unlink(f"{directory}/users/{user}")
            except FileNotFoundError:
                pass
            if _last_out(directory):
                with _locked(directory) as held:
                    if held and _last_out(directory):
                        self._release(directory)
        except OSError as error:
            raise from_os_error(error, f"detach layer sha256:{key}") from error

    def remount(self, key: str, image: str, devices: Sequence[AnyPath]) -> None:
        """Mount a layer anew in place of its mount, for the same users: from now on they attach to the new one.

        Overlays that stand keep what they were mounted over, as do files that are open. When it fails, the mount that
        there was is still there.

        Raises:
            NotFoundError: nobody uses the layer.
            And what :func:`overlay.erofs.mount_erofs` raises.
        """
        if not is_key(key):
            raise UsageError(f"not a layer: {key!r}")
        directory = f"{self._root}/{key}"
        mount_point = directory + "/mnt"
        try:
            with _locked(directory) as held:
                if not held or not self.users(key):
                    raise NotFoundError(f"nobody uses layer sha256:{key}")
                # The new one slides under the old one, so that the path never leads to a bare directory: somebody who
                # has just attached may be about to mount an overlay over it.
                mounted = self._is_mounted(mount_point)
                mount_erofs(image, devices, mount_point, beneath=mounted)
                if mounted:
                    umount(mount_point, MNT_DETACH)
        except OSError as error:
            raise from_os_error(error, f"mount layer sha256:{key} anew") from error

    @contextmanager
    def held(self, keys: Iterable[str]) -> Iterator[None]:
        """Keep layers from being mounted, unmounted or mounted anew; for who uses them."""
        with ExitStack() as stack:
            for key in sorted(set(keys)):  # one order for all, or two of us would wait for each other
                stack.enter_context(_locked(f"{self._root}/{key}"))
            yield

    def users(self, key: str) -> list[str]:
        try:
            return sorted(os.listdir(f"{self._root}/{key}/users"))
        except FileNotFoundError:
            return []

    def mounted(self) -> list[str]:
        """The keys of the layers that are mounted now, sorted."""
        return sorted(key for key in self._keys() if self._is_mounted(f"{self._root}/{key}/mnt"))

    def sweep(self, is_valid: Callable[[str], bool]) -> list[Leftover]:
        """Remove users for whom ``is_valid`` says no, then unmount layers that nobody uses.

        ``is_valid`` is asked after the name has been seen, so a user must exist before it attaches.
        """
        found: list[Leftover] = []
        for key in self._keys():
            directory = f"{self._root}/{key}"
            try:
                with _locked(directory, create=True) as held:
                    if not held:
                        continue
                    for user in self.users(key):
                        if not is_valid(user):
                            path = f"{directory}/users/{user}"
                            _unlink(path)
                            found.append(Leftover("layer user", path, "removed"))
                    if _last_out(directory):
                        found.append(Leftover("layer without users", directory, "unmounted"))
                        self._release(directory)
            except OSError as error:
                raise from_os_error(error, f"sweep layer sha256:{key}") from error
        return found

    def _keys(self) -> list[str]:
        try:
            return sorted(filter(is_key, os.listdir(self._root)))
        except FileNotFoundError:
            return []

    def _is_mounted(self, mount_point: str) -> bool:
        """Whether something is mounted there: its st_dev differs from that of the directory it would be part of."""
        try:
            if self._device is None:
                self._device = os.stat(self._root).st_dev
            return os.stat(mount_point).st_dev != self._device
        except FileNotFoundError:
            return False

    def _attach_slowly(self, layer: MountableLayer, directory: str, user: str) -> str:
        mount_point = directory + "/mnt"
        os.makedirs(self._root, 0o700, exist_ok=True)
        while True:
            _mkdir(directory)
            with _locked(directory, create=True) as held:
                if not held:
                    continue  # it was released and its directory removed while we waited
                _mkdir(mount_point)
                try:
                    if not self._is_mounted(mount_point):
                        mount_erofs(layer.image, layer.devices, mount_point)
                    _mkdir(directory + "/users")
                    while not _add_user(directory, user):
                        _mkdir(directory + "/users")  # it was empty, and somebody who left has just removed it
                except BaseException:
                    if _last_out(directory):
                        self._release(directory)
                    raise
                return mount_point

    def _release(self, directory: str) -> None:
        """Unmount and remove a layer's directory. The lock is held and ``users`` is gone."""
        mount_point = directory + "/mnt"
        while self._is_mounted(mount_point):
            # Somebody may stand in it (a shell, a backup); overlays hold clones of their own. Nothing is lost by
            # detaching: the filesystem goes when the last file in it is closed.
            umount(mount_point, MNT_DETACH)
        for path in (mount_point, directory):
            if path == directory:
                _unlink(directory + "/lock")
            try:
                os.rmdir(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # another has come and made its lock: it is theirs now
                    raise


def _add_user(directory: str, user: str) -> bool:
    """Register ``user``; False when nobody is registered, so that the layer may be on its way out."""
    try:
        os.link(f"{directory}/lock", f"{directory}/users/{user}")
    except FileExistsError:
        pass
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EMLINK:  # ext4 takes 65,000 names for one file
            raise
        os.close(os.open(f"{directory}/users/{user}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    return True


def _last_out(directory: str) -> bool:
    """Remove ``users`` if nobody is left in it; whether it is gone."""
    try:
        os.rmdir(directory + "/users")
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


@contextmanager
def _locked(directory: str, *, create: bool = False) -> Iterator[bool]:
    """Hold the layer's lock. False when it doesn't exist, or was removed by the holder that we waited for."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        fd = os.open(directory + "/lock", flags, 0o600)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            current = os.stat(directory + "/lock")
        except FileNotFoundError:
            yield False
            return
        yield os.path.samestat(os.fstat(fd), current)
    finally:
        os.close(fd)


def _mkdir(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
