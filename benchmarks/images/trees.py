"""Root file systems and edits of them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.images.layers import EPOCH, walk

SUITE = "bookworm"
_STEP = 4096
"""Bytes between two changes of :func:`perturb`: no chunk of a changed file stays what it was."""


def debian(tree: Path, packages: Iterable[str], log: Path, *, variant: str = "minbase") -> None:
    """Install Debian into ``tree``: the suite's ``variant`` as mmdebstrap names it, and ``packages``."""
    command = ["mmdebstrap", f"--variant={variant}", "--format=directory"]
    command += [f"--include={package}" for package in packages]
    command += ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", SUITE, str(tree), str(machine_sources())]
    run(command, log, tries=2, remove=tree)
    for name, content in (("hostname", "debian\n"), ("resolv.conf", "")):  # mmdebstrap copies the machine's
        (tree / "etc" / name).unlink(missing_ok=True)
        (tree / "etc" / name).write_text(content)
    for name in ("etc/apt/sources.list.d", "var/lib/apt/lists", "var/cache/apt/archives", "dev"):
        shutil.rmtree(tree / name, ignore_errors=True)  # the machine's mirror, and what its apt left
        (tree / name).mkdir()
    (tree / "etc/apt/sources.list").unlink(missing_ok=True)


def machine_sources() -> Path:
    """Where the machine's own apt finds the suite, in either of apt's two notations."""
    apt = Path("/etc/apt")
    for path in (
        *sorted(apt.glob("sources.list.d/*.sources")),
        apt / "sources.list",
        *apt.glob("sources.list.d/*.list"),
    ):
        if path.exists() and re.search(rf"^(Suites:|deb ).*\b{SUITE}\b", path.read_text(), re.MULTILINE):
            return path
    raise SystemExit(f"the machine's apt has no source for {SUITE}")


def pip_install(tree: Path, requirements: Iterable[str], log: Path, *, target: str, compiled: bool = False) -> None:
    """Install wheels below ``target`` of ``tree`` as pip of Debian 12's Python would find them."""
    directory = tree / target
    with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
        command = [sys.executable, "-m", "pip", "install", "--no-compile", "--only-binary=:all:"]
        command += ["--python-version=3.11", f"--target={scratch}/site", *requirements]
        site = f"{scratch}/site"
        run(command, log, tries=2)
        _drop_scripts(Path(site))
        settle(Path(site))  # before compiling: a .pyc holds the time of its source
        if compiled:
            _compile(Path(site), Path(site), f"/{target}", log)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copytree(site, directory, symlinks=True, dirs_exist_ok=True)


def compile_sources(tree: Path, target: str, log: Path) -> None:
    """What Debian 12's Python writes when it imports all modules below ``target`` of ``tree``."""
    _compile(tree / target, tree, "/", log)


def _compile(directory: Path, strip: Path, prepend: str, log: Path) -> None:
    run([sys.executable, "-m", "compileall", "-q", "-s", str(strip), "-p", prepend, str(directory)], log)


def _drop_scripts(site: Path) -> None:
    """Console scripts name the Python that runs pip here, which no image has."""
    shutil.rmtree(site / "bin", ignore_errors=True)
    for record in site.glob("*.dist-info/RECORD"):
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if not line.startswith("../../bin/")))


def pip_sources(tree: Path, requirements: Iterable[str], log: Path) -> None:
    """Unpack source distributions side by side into ``tree``."""
    tree.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", f"--dest={scratch}"]
        run([*command, *requirements], log, tries=2)
        for archive in sorted(Path(scratch).iterdir()):
            run(["tar", "--extract", "--no-same-owner", "-C", str(tree), "-f", str(archive)], log)


def pip_wheels(directory: Path, requirements: Iterable[str], log: Path) -> None:
    """Put wheels of pure Python into ``directory``, as they are."""
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--platform=any"]
    run([*command, f"--dest={directory}", *requirements], log, tries=2)
    settle(directory)


def settle(tree: Path) -> None:
    """Give everything below ``tree`` the time :data:`EPOCH`."""
    for name in walk(tree):
        os.utime(os.path.join(os.fsencode(tree), name), (EPOCH, EPOCH), follow_symlinks=False)


@contextmanager
def edit(tree: Path) -> Iterator[Path]:
    """A copy of ``tree`` to change by replacing files; files that stay are shared with it."""
    copy = Path(tempfile.mkdtemp(prefix=f"{tree.name}-", dir=tree.parent))
    try:
        subprocess.run(["cp", "-al", f"{tree}/.", str(copy)], check=True)
        yield copy
    finally:
        shutil.rmtree(copy)


def replace(path: Path, content: bytes) -> None:
    """Give ``path`` new bytes and a new inode, with the old mode, owner and xattrs, and the time :data:`EPOCH`."""
    partial = path.with_name(f".{path.name}.new")
    partial.write_bytes(content)
    status = path.stat()
    os.chown(partial, status.st_uid, status.st_gid)  # before the xattrs: it would take a capability away
    shutil.copystat(path, partial)
    os.utime(partial, (EPOCH, EPOCH))
    partial.rename(path)


def perturb(tree: Path, names: Iterable[bytes], share: float) -> int:
    """Change every chunk of some of the files ``names``, together ``share`` of their bytes; returns those bytes."""
    files = [Path(os.fsdecode(os.path.join(os.fsencode(tree), name))) for name in names]
    files = [file for file in files if not file.is_symlink() and file.is_file() and file.stat().st_size]
    wanted = int(sum(file.stat().st_size for file in files) * share)
    changed = 0
    for file in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.relative_to(tree))).digest()):
        size = file.stat().st_size
        if changed + size > wanted * 1.01:
            continue
        content = file.read_bytes()
        mark = hashlib.sha256(content).hexdigest()[:16].encode() + b"\n"
        replace(file, b"".join(mark + content[at : at + _STEP] for at in range(0, size, _STEP)))
        changed += size
        if changed >= wanted:
            break
    return changed


def run(command: list[str], log: Path, *, tries: int = 1, remove: Path | None = None) -> None:
    """Run a program with its output in ``log``; ``remove`` is what a failed try leaves behind."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "DEBIAN_FRONTEND": "noninteractive"}
    for _ in range(tries):
        with log.open("ab") as stream:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment)
        if done.returncode == 0:
            return
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
    raise SystemExit(f"{command[0]} failed (exit {done.returncode}), see {log}")
