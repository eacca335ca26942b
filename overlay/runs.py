"""What runs in a sandbox, so that removing it can stop it first.

``<sandbox>/runs/<name>`` is one JSON object per run: either a container of an OCI runtime, whose own state lies in
``<sandbox>/runs/runtime``, or the first process of a chroot's pid namespace, named by pid and start time. The file
is there before the run starts and goes when it has ended; a file that stays behind is a run whose caller died.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from dataclasses import asdict, dataclass

from layerstore.errors import UnavailableError, printable

DIRECTORY = "runs"
RUNTIME_STATE = "runtime"


@dataclass(frozen=True, slots=True)
class Run:
    """``runtime`` is the path of an OCI runtime, or empty for a chroot; only the fields of its kind are set."""

    name: str
    runtime: str = ""
    pid: int = 0
    start: int = 0


def runtime_root(sandbox: str) -> str:
    """Where OCI runtimes keep the state of this sandbox's containers (their ``--root``)."""
    return os.path.join(sandbox, DIRECTORY, RUNTIME_STATE)


def register(sandbox: str, run: Run) -> None:
    directory = os.path.join(sandbox, DIRECTORY)
    os.makedirs(directory, 0o700, exist_ok=True)
    path = os.path.join(directory, run.name)
    with open(path + ".new", "w", encoding="ascii") as stream:
        json.dump(asdict(run), stream)
    os.rename(path + ".new", path)


def unregister(sandbox: str, name: str) -> None:
    try:
        os.unlink(os.path.join(sandbox, DIRECTORY, name))
    except FileNotFoundError:
        pass


def start_time(pid: int) -> int:
    """When ``pid`` started, in clock ticks since boot: with the pid it names a process for good. 0: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # field 22; the second one, in parentheses, may itself hold spaces and parentheses
            return int(stream.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def stop_all(sandbox: str) -> list[str]:
    """Kill every run of the sandbox and wait until it is gone; returns their names.

    Raises:
        UnavailableError: a runtime could not stop its container.
    """
    directory = os.path.join(sandbox, DIRECTORY)
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    stopped = []
    for name in sorted(names):
        path = os.path.join(directory, name)
        if name == RUNTIME_STATE or name.endswith(".new"):
            continue
        try:
            with open(path, "rb") as stream:
                run = Run(**json.load(stream))
        except (OSError, ValueError, TypeError):
            continue  # ended meanwhile, or never written completely
        stop(sandbox, run)
        unregister(sandbox, name)
        stopped.append(name)
    return stopped


def stop(sandbox: str, run: Run) -> None:
    """Kill one run and wait until it is gone."""
    if run.runtime:
        _delete_container(sandbox, run)
    else:
        _kill(run)


def _delete_container(sandbox: str, run: Run) -> None:
    ran = subprocess.run(
        [run.runtime, "--root", runtime_root(sandbox), "delete", "--force", run.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    # a container that ends at this moment is deleted by the `run` that waits for it, and we come second
    if ran.returncode and os.path.lexists(os.path.join(runtime_root(sandbox), run.name)):
        said = printable(ran.stderr.strip())[:300]
        raise UnavailableError(f"{run.runtime} could not stop container {run.name}: {said}")


def _kill(run: Run) -> None:
    """Kill the first process of a pid namespace; the kernel kills the others before it lets go of it."""
    try:
        fd = os.pidfd_open(run.pid)
    except ProcessLookupError:
        return
    try:
        if start_time(run.pid) != run.start:
            return  # the pid belongs to another by now
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        _wait(fd)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def _wait(pidfd: int) -> None:

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(10_000)
