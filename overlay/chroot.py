"""Running a command in a sandbox without an OCI runtime.

Three processes: the *monitor* enters new mount, pid and ipc namespaces; the *init* is the first process of the pid
namespace, mounts /proc, /sys and /dev, makes the root filesystem its root (and lets go of the host's mounts), passes
signals on and collects orphans; the *command* drops to its user and executes. When the init ends, the kernel kills
whatever else the command has started; when the caller dies, all of them are killed.

Capabilities, masked and read-only paths are those of :mod:`overlay.bundle`; there is neither seccomp nor a cgroup nor a
host name of its own.
"""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable
from typing import NoReturn

from layerstore.errors import UnavailableError, printable
from overlay import runs, signals
from overlay.bundle import CAPABILITIES, MASKED_PATHS, READONLY_PATHS
from overlay.mountapi import (
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    MS_STRICTATIME,
    die_with_parent,
    drop_capabilities,
    mount,
    pivot_root,
    umount,
    unshare,
)
from overlay.process import Process

NOT_EXECUTABLE = 126
NOT_FOUND = 127
"""Exit codes of a command that could not be started, as POSIX shells give them."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = (
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("pts/ptmx", "ptmx"),
)


def run_in_chroot(process: Process, rootfs: str, sandbox: str) -> int:
    """Run ``process`` with its root at ``rootfs`` and this process's standard streams; returns its exit code.

    Call it from a single-threaded process: it forks.

    Args:
        process: what to run.
        rootfs: the mounted root filesystem.
        sandbox: its directory, where the run is registered while it lasts.

    Raises:
        UnavailableError: the namespaces or mounts could not be made; the command has not run.
    """
    name = f"chroot-{os.getpid()}-{os.urandom(4).hex()}"
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with signals.held() as mask:
        caller = os.getpid()
        monitor = os.fork()
        if monitor == 0:
            os.close(reader)
            _child(writer, lambda: _monitor(process, rootfs, sandbox, name, writer, mask, caller))
        try:
            os.close(writer)
            failure = _read_all(reader)
            code = signals.wait(monitor)
        except BaseException:
            _kill(monitor)
            raise
        finally:
            os.close(reader)
            runs.unregister(sandbox, name)
    if failure:
        raise UnavailableError(failure.decode("utf-8", "replace"))
    return code


def _read_all(fd: int) -> bytes:
    """What is written until the last writer closes or executes."""
    parts = []
    while part := os.read(fd, 4096):
        parts.append(part)
    return b"".join(parts)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _child(failures: int, body: Callable[[], int]) -> NoReturn:
    """Run ``body`` in a forked process and end it; nothing of the parent's stack is ever unwound here."""
    code = 1
    try:
        code = body()
    except OSError as error:
        message = f"start command in a chroot: {error.strerror}"
        if error.filename is not None:
            message += f" ({printable(error.filename if isinstance(error.filename, bytes) else str(error.filename))})"
        os.write(failures, message.encode("utf-8", "replace"))
    except BaseException:
        os.write(failures, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _monitor(
    process: Process, rootfs: str, sandbox: str, name: str, failures: int, mask: frozenset[int], caller: int
) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.FORWARDED | {signal.SIGCHLD})
    die_with_parent(signal.SIGKILL)
    if os.getppid() != caller:
        return 1  # it died before it could take us with it
    unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    ready, go = os.pipe2(os.O_CLOEXEC)
    init = os.fork()
    if init == 0:
        _child(failures, lambda: _init(process, rootfs, failures, mask, ready, go))
    os.close(ready)
    runs.register(sandbox, runs.Run(name, pid=init, start=runs.start_time(init)))
    os.write(go, b"g")
    os.close(go)
    os.close(failures)
    return signals.wait(init)


def _init(process: Process, rootfs: str, failures: int, mask: frozenset[int], ready: int, go: int) -> int:
    os.close(go)
    die_with_parent(signal.SIGKILL)
    if not os.read(ready, 1):
        return 1  # the monitor has died before it could tell about us
    os.close(ready)
    _enter(rootfs)
    command = os.fork()
    if command == 0:
        _child(failures, lambda: _execute(process, mask, failures))
    os.close(failures)
    return _reap(command)


def _enter(rootfs: str) -> None:
    """Mount what programs expect and make ``rootfs`` the root; the host's mounts disappear from this namespace."""
    # A mount of its own, so that its flags and children are ours alone.
    mount(rootfs, rootfs, "", MS_BIND | MS_REC)
    os.chdir(rootfs)
    for name in ("proc", "sys", "dev"):
        _mount_point(name)
    flags = MS_NOSUID | MS_NOEXEC | MS_NODEV
    mount("proc", "proc", "proc", flags)
    mount("sysfs", "sys", "sysfs", flags | MS_RDONLY)
    mount("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_STRICTATIME, b"mode=755,size=65536k")
    for name in _DEVICES:
        os.close(os.open(f"dev/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        mount(f"/dev/{name}", f"dev/{name}", "", MS_BIND)
    for target, name in _LINKS:
        os.symlink(target, f"dev/{name}")
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(f"dev/{name}")
    mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, b"newinstance,ptmxmode=0666,mode=0620,gid=5")
    mount("shm", "dev/shm", "tmpfs", flags, b"mode=1777,size=65536k")
    mount("mqueue", "dev/mqueue", "mqueue", flags)
    _hide()
    pivot_root(".", ".")  # the old root ends up on top of the new one at "."
    umount(".", MNT_DETACH)
    os.chdir("/")


def _hide() -> None:
    """Cover what the kernel offers in /proc and /sys to root alone, as OCI runtimes do."""
    for path in READONLY_PATHS:
        inside = path.lstrip("/")
        if os.path.lexists(inside):
            mount(inside, inside, "", MS_BIND | MS_REC)
            mount("none", inside, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC | MS_NODEV)
    for path in MASKED_PATHS:
        inside = path.lstrip("/")
        if os.path.isdir(inside):
            mount("tmpfs", inside, "tmpfs", MS_RDONLY)
        elif os.path.lexists(inside):
            mount("/dev/null", inside, "", MS_BIND)


def _mount_point(name: str) -> None:
    """A directory of the image to mount on, made if missing, refused if a link could lead elsewhere."""
    try:
        os.mkdir(name, 0o755)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno == errno.EROFS:
            raise OSError(errno.EROFS, f"the image has no /{name} and the sandbox is read-only", name) from error
        raise
    if os.path.islink(name) or not os.path.isdir(name):
        raise OSError(errno.ENOTDIR, f"/{name} of the image is not a directory", name)


def _reap(command: int) -> int:
    """Be the init: pass signals on, collect orphans, and end with the command."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == command:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if ended:
            continue
        received = signal.sigwaitinfo(signals.FORWARDED | {signal.SIGCHLD})
        if received.si_signo != signal.SIGCHLD and received.si_code != signals.SI_KERNEL:
            try:
                os.kill(command, received.si_signo)
            except ProcessLookupError:
                pass


def _execute(process: Process, mask: frozenset[int], failures: int) -> int:
    user = process.user
    drop_capabilities(keep=CAPABILITIES)
    os.setgroups(user.additional_gids)
    os.setgid(user.gid)
    try:
        os.makedirs(process.cwd, 0o755, exist_ok=True)  # as runc does
    except OSError:
        pass  # what matters is whether it can be entered
    os.setuid(user.uid)
    os.chdir(process.cwd)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python has its own for these
        signal.signal(number, signal.SIG_DFL)
    env = dict(item.partition("=")[::2] for item in process.env)
    try:
        os.execvpe(process.args[0], process.args, env)
    except OSError as error:
        os.close(failures)
        shown = printable(process.args[0])
        os.write(2, f"imgtool: can't run {shown} in the sandbox: {error.strerror}\n".encode())
        return NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else NOT_EXECUTABLE
