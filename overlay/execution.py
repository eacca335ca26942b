"""Run a command in a sandbox: with runc or crun where there is one, else in a chroot of our own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layerstore.errors import ConflictError, NotFoundError, os_errors, printable
from layerstore.oci.config import RunConfig
from overlay import runs, signals
from overlay.bundle import write_bundle
from overlay.chroot import NOT_EXECUTABLE, NOT_FOUND, run_in_chroot
from overlay.inroot import is_program
from overlay.privilege import require_root
from overlay.process import DEFAULT_PATH, Process, process_of
from overlay.sandbox import Sandbox

CHROOT = "chroot"
"""The name of running without an OCI runtime."""
RUNTIMES = ("runc", "crun")
"""OCI runtimes, the preferred one first."""
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Attributes:
        exit_code: the command's, 128+n when signal n ended it; 127 when the image lacks it, 126 when it is no program.
        runtime: what ran it, a path or "chroot".
        reason: why it was not started, else empty.
    """

    exit_code: int
    runtime: str
    reason: str = ""


def find_runtime(wanted: str | None = None) -> str:
    """The path of an OCI runtime, or "chroot".

    Args:
        wanted: a name or path, "chroot", or None for the first of RUNTIMES that works here, else "chroot".

    Raises:
        NotFoundError: ``wanted`` isn't installed.
    """
    if wanted == CHROOT:
        return CHROOT
    if wanted is None:
        return next(iter(usable_runtimes()), CHROOT)
    path = shutil.which(wanted, path=SEARCH_PATH)
    if path is not None:
        return os.path.abspath(path)
    raise NotFoundError(f"no OCI runtime {printable(wanted)!r}; install runc or crun, or choose chroot")


def usable_runtimes() -> Iterator[str]:
    """The paths of those of RUNTIMES that are installed and can start something here."""
    for name in RUNTIMES:
        path = shutil.which(name, path=SEARCH_PATH)
        if path is not None and not (name == "crun" and _cgroups_are_mixed()):
            yield path


def _cgroups_are_mixed() -> bool:
    """Whether cgroup v1 and v2 share the controllers ("hybrid mode"), in which crun (1.8) refuses to do anything."""
    try:
        with open("/sys/fs/cgroup/unified/cgroup.controllers", "rb") as stream:
            return bool(stream.read().strip())
    except OSError:
        return False


def run(
    sandbox: Sandbox,
    argv: Sequence[str] | None,
    config: RunConfig,
    *,
    runtime: str | None = None,
    terminal: bool = False,
) -> Outcome:
    """Run ``argv`` in the sandbox and wait for it, with this process's standard streams.

    Signals that this process gets meanwhile go to the command. A working directory that the image lacks is made, as
    runc does.

    Args:
        sandbox: a standing sandbox.
        argv: the whole command line; None or empty for the image's own.
        config: what the image says about running it.
        runtime: see :func:`find_runtime`.
        terminal: with an OCI runtime, give the command a terminal of its own (standard input must be one).

    Raises:
        UsageError, NotFoundError, MalformedError: see :func:`overlay.process.process_of`.
        PermissionError_: not root.
        ConflictError: the sandbox isn't mounted.
        UnavailableError: the chroot could not be set up. An OCI runtime that fails says so on standard error itself,
            and its exit code is the outcome's.
    """
    require_root()
    if not sandbox.stands:
        raise ConflictError(f"sandbox {sandbox.id} is not mounted; remove it with `imgtool down {sandbox.id}`")
    chosen = find_runtime(runtime)
    with os_errors(f"run a command in sandbox {sandbox.id}"):
        process = process_of(config, sandbox.rootfs, argv)
        # Each runtime tells this in its own way, runc with exit code 1, which may be the command's as well.
        if (found := find_program(process, sandbox.rootfs)) is not True:
            name = printable(process.args[0])
            if found is None:
                return Outcome(NOT_FOUND, chosen, f"{name}: not found in the image")
            return Outcome(NOT_EXECUTABLE, chosen, f"{name}: not an executable file")
        if chosen == CHROOT:
            return Outcome(run_in_chroot(process, sandbox.rootfs, sandbox.directory), CHROOT)
        return Outcome(_run_in_container(argv, config, sandbox, chosen, terminal), chosen)


def find_program(process: Process, rootfs: str) -> bool | None:
    """True where the command is a program of the image; False where it is something else, None where it isn't there."""
    command = process.args[0]
    places = [""]
    if "/" not in command:
        paths = [item.partition("=")[2] for item in process.env if item.startswith("PATH=")]
        places = (paths[-1] if paths else DEFAULT_PATH).split(":")
    found = [is_program(rootfs, os.path.join(process.cwd, place, command)) for place in places]
    return True if True in found else False if False in found else None


def _run_in_container(
    argv: Sequence[str] | None, config: RunConfig, sandbox: Sandbox, runtime: str, terminal: bool
) -> int:
    name = f"imgtool-{sandbox.id}-{os.urandom(4).hex()}"
    state = runs.runtime_root(sandbox.directory)
    bundle = f"{sandbox.directory}/{runs.DIRECTORY}/{name}.bundle"
    path = write_bundle(bundle, sandbox, config, args=argv, terminal=terminal)
    try:
        entry = runs.Run(name, runtime=runtime)
        runs.register(sandbox.directory, entry)
        with signals.held() as mask:
            pid = os.posix_spawn(
                runtime,
                [runtime, "--root", state, "run", "--bundle", bundle, name],
                {"PATH": SEARCH_PATH},
                setsigmask=mask,
            )
            return signals.wait(pid)
    finally:
        if os.path.lexists(f"{state}/{name}"):  # the runtime was killed before it could tidy up
            runs.stop(sandbox.directory, entry)
        runs.unregister(sandbox.directory, name)
        try:
            os.unlink(path)
            os.rmdir(bundle)
        except FileNotFoundError:
            pass  # the sandbox has been removed under the command
