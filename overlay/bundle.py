"""An OCI runtime bundle: the ``config.json`` with which ``runc run`` and ``crun run`` start a sandbox.

After runtime-spec 1.0.2, with the capabilities, masked and read-only paths that Docker gives by default. Mount, pid,
ipc and uts namespaces are new; the network is the host's, and there is no seccomp profile: who runs what they don't
trust puts a virtual machine around it, or adds both to the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from layerstore.errors import UsageError, os_errors, printable
from layerstore.oci.config import RunConfig
from overlay.process import Process, process_of
from overlay.sandbox import Sandbox

OCI_VERSION = "1.0.2"

CAPABILITIES = (
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)

MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)

READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

MOUNTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("/proc", "proc", "proc", ("nosuid", "noexec", "nodev")),
    ("/dev", "tmpfs", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5")),
    ("/dev/shm", "tmpfs", "shm", ("nosuid", "noexec", "nodev", "mode=1777", "size=65536k")),
    ("/dev/mqueue", "mqueue", "mqueue", ("nosuid", "noexec", "nodev")),
    ("/sys", "sysfs", "sysfs", ("nosuid", "noexec", "nodev", "ro")),
)
"""(destination, type, source, options) of what every container gets."""

NAMESPACES = ("pid", "ipc", "uts", "mount")


def runtime_config(
    process: Process,
    rootfs: str,
    *,
    hostname: str,
    read_only: bool = False,
    terminal: bool = False,
    mounts: Sequence[Mapping[str, object]] = (),
) -> dict[str, object]:
    """The document, as a value.

    Args:
        process: what to run.
        rootfs: the sandbox's root filesystem, absolute or relative to the bundle.
        hostname: what the container calls itself.
        read_only: the root can't be written.
        terminal: give the process a terminal of its own; the runtime's caller must have one.
        mounts: further mounts, as the runtime-spec writes them.
    """
    capabilities = list(CAPABILITIES)
    granted = capabilities if process.user.uid == 0 else []  # others gain them by set-user-ID programs only
    return {
        "ociVersion": OCI_VERSION,
        "process": {
            "terminal": terminal,
            "user": {
                "uid": process.user.uid,
                "gid": process.user.gid,
                "additionalGids": list(process.user.additional_gids),
            },
            "args": list(process.args),
            "env": list(process.env),
            "cwd": process.cwd,
            "capabilities": {"bounding": capabilities, "effective": granted, "permitted": granted},
            "noNewPrivileges": False,
        },
        "root": {"path": rootfs, "readonly": read_only},
        "hostname": hostname,
        "mounts": [
            *(
                {"destination": destination, "type": kind, "source": source, "options": list(options)}
                for destination, kind, source, options in MOUNTS
            ),
            *(dict(mount) for mount in mounts),
        ],
        "linux": {
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": kind} for kind in NAMESPACES],
            "maskedPaths": list(MASKED_PATHS),
            "readonlyPaths": list(READONLY_PATHS),
        },
    }


def write_bundle(
    directory: str,
    sandbox: Sandbox,
    config: RunConfig,
    *,
    args: Sequence[str] | None = None,
    terminal: bool = False,
    mounts: Sequence[Mapping[str, object]] = (),
) -> str:
    """Write ``config.json`` for a standing sandbox into ``directory``, made if it is missing; returns the file's path.

    Args:
        directory: the bundle; the root filesystem stays where the sandbox has it.
        sandbox: where to run.
        config: what the image wants to run.
        args: a whole command line instead of the image's.
        terminal: see :func:`runtime_config`.
        mounts: see :func:`runtime_config`.

    Raises:
        UsageError: ``directory`` has a config.json already, or there is nothing to run.
        NotFoundError, MalformedError: see :func:`overlay.process.process_of`.
        NoSpaceError, PermissionError_: it can't be written.
    """
    document = runtime_config(
        process_of(config, sandbox.rootfs, args),
        sandbox.rootfs,
        hostname=sandbox.id,
        read_only=sandbox.state.read_only,
        terminal=terminal,
        mounts=mounts,
    )
    path = os.path.join(directory, "config.json")
    with os_errors(f"write bundle {printable(directory)}"):
        os.makedirs(directory, exist_ok=True)
        new = path + ".new"
        try:
            with open(new, "x", encoding="utf-8", errors="surrogateescape") as stream:
                json.dump(document, stream, indent=2, ensure_ascii=False)
                stream.write("\n")
            os.link(new, path)
        except FileExistsError:
            raise UsageError(f"{printable(path)} exists; choose another directory for the bundle") from None
        finally:
            if os.path.lexists(new):
                os.unlink(new)
    return path
