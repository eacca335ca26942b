"""The images: what each is made of."""

from __future__ import annotations

import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images import layers, trees
from benchmarks.images.layout import Layer, Layout

RECIPES_VERSION = "1"
"""Change it with any change of what an image holds: directories built by another one are built anew."""

FULL = ("python3", "gcc", "g++", "make", "git", "perl", "python3-numpy", "python3-pandas")
DJANGO_RELEASES = tuple(f"4.2.{point}" for point in range(1, 11))
SITE = "usr/local/lib/python3.11/dist-packages"
SOURCES = ("django==4.2.16", "sympy==1.13.3", "sphinx==8.1.3", "pytest==8.3.3", "flask==3.0.3", "requests==2.32.3")
LIBRARIES = ("asgiref", "sqlparse", "mpmath", "jinja2", "docutils", "pygments", "werkzeug", "urllib3", "hypothesis")
TOOLS = (*FULL, "python3-pip", "python3-venv")
WHEELS = (
    *("attrs==24.2.0", "click==8.1.7", "docutils==0.21.2", "flask==3.0.3", "idna==3.10", "jinja2==3.1.4"),
    *("more-itertools==10.5.0", "networkx==3.3", "packaging==24.1", "pygments==2.18.0", "requests==2.32.3"),
    *("rich==13.9.1", "tomli==2.0.1", "tqdm==4.66.5", "urllib3==2.2.3", "werkzeug==3.0.4"),
)
"""Pure Python: one wheel of each."""
COMMITS = 40
"""Of each repository of the workloads."""
SMALL = ("base-files", "base-passwd", "dash", "coreutils", "libc6", "iputils-ping", "perl-base", "tzdata")


@dataclass(frozen=True)
class Workshop:
    """The directory that everything is built in."""

    directory: Path

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def layout(self, name: str) -> Layout:
        return Layout(self.directory / name)

    def base(self, name: str, packages: Iterable[str], *, variant: str = "minbase") -> Path:
        """The tree of Debian and ``packages``, built once."""
        tree = self.directory / "trees" / name
        if not tree.exists():
            partial = tree.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            trees.debian(partial, packages, self.log, variant=variant)
            partial.rename(tree)
        return tree

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        directory = self.directory / "trees" / f"{name}.partial"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


def minbase(shop: Workshop) -> None:
    """Debian's minimal system as one layer."""
    _base_image(shop, "debian", "minbase", shop.base("minbase", ()))


def full(shop: Workshop) -> None:
    """minbase, and interpreters, compilers, numpy and pandas as a second layer."""
    layout = shop.layout("debian")
    lower, upper = shop.base("minbase", ()), shop.base("full", FULL)
    layer = layers.add_layer(layout, upper, layers.difference(lower, upper), "install " + " ".join(FULL))
    layout.tag("full", (*layout.layers("minbase"), layer), Cmd=["/bin/bash"])


def changed(shop: Workshop) -> None:
    """full as a rebuild would give it: files with 5 % of the second layer's bytes differ in every chunk."""
    layout = shop.layout("debian")
    lower = shop.base("minbase", ())
    with trees.edit(shop.base("full", FULL)) as upper:
        trees.perturb(upper, layers.difference(lower, upper).members, 0.05)
        layer = layers.add_layer(layout, upper, layers.difference(lower, upper), "install again, 5 % changed")
    layout.tag("changed", (*layout.layers("minbase"), layer), Cmd=["/bin/bash"])


def workspace(shop: Workshop) -> None:
    """full, a layer of libraries that also tidies the base, and a layer of source trees with a history."""
    layout = shop.layout("debian")
    base = shop.base("full", FULL)
    with trees.edit(base) as prepared:
        trees.pip_install(prepared, LIBRARIES, shop.log, target=SITE, compiled=True)
        for name in ("usr/share/man", "usr/share/doc/perl", "usr/share/doc/git"):
            shutil.rmtree(prepared / name, ignore_errors=True)
        for extra in sorted((prepared / "usr/share/info").glob("*")) + sorted(
            (prepared / "usr/share/lintian").glob("*")
        ):
            shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
        replaced = prepared / "usr/share/bash-completion"
        shutil.rmtree(replaced, ignore_errors=True)
        replaced.mkdir()
        (replaced / "README").write_text("Completions are not installed.\n")
        trees.replace(prepared / "etc/bash.bashrc", (prepared / "etc/bash.bashrc").read_bytes() + b"umask 022\n")
        content = layers.difference(base, prepared, opaque=[b"usr/share/bash-completion"])
        libraries = layers.add_layer(layout, prepared, content, "pip install " + " ".join(LIBRARIES))
        with trees.edit(prepared) as upper:
            _add_sources(shop, upper)
            (upper / "etc/motd").unlink(missing_ok=True)
            sources = layers.add_layer(layout, upper, layers.difference(prepared, upper), "COPY . /src")
    layout.tag("workspace", (*layout.layers("full"), libraries, sources), Cmd=["/bin/bash"], WorkingDir="/src/django")


def workloads(shop: Workshop) -> None:
    """What benchmarks.workloads runs: a base with pip, and a workspace of libraries, sources with a history, wheels."""
    layout = shop.layout("debian")
    lower, base = shop.base("minbase", ()), shop.base("tools", TOOLS)
    layer = layers.add_layer(layout, base, layers.difference(lower, base), "install " + " ".join(TOOLS))
    layout.tag("tools", (*layout.layers("minbase"), layer), Cmd=["/bin/bash"])
    with trees.edit(base) as upper:
        trees.pip_install(upper, (*LIBRARIES, "pytest==8.3.3"), shop.log, target=SITE, compiled=True)
        trees.pip_wheels(upper / "wheels", WHEELS, shop.log)
        _add_sources(shop, upper, commits=COMMITS)
        trees.compile_sources(upper, "src/sympy/sympy", shop.log)  # somebody has run its tests before
        layer = layers.add_layer(layout, upper, layers.difference(base, upper), "pip install, COPY . /src")
    layout.tag("workloads", (*layout.layers("tools"), layer), Cmd=["/bin/bash"], WorkingDir="/src")


def toolkit(shop: Workshop) -> None:
    """A tree of evaluator tools: scripts, and the libraries that they run with."""
    final = shop.directory / "toolkit"
    with shop.scratch("toolkit") as tree:
        trees.pip_install(
            tree, ("pytest==8.3.3", "coverage==7.6.1", "pyyaml==6.0.2"), shop.log, target="opt/evaluator/lib"
        )
        _script(tree / "opt/evaluator/bin/evaluate", 'PYTHONPATH=/opt/evaluator/lib exec python3 -m pytest -q "$@"')
        _script(tree / "opt/evaluator/bin/report", 'PYTHONPATH=/opt/evaluator/lib exec python3 -m coverage report "$@"')
        (tree / "opt/evaluator/bin/test").symlink_to("evaluate")
        trees.settle(tree)
        tree.rename(final)
        tree.mkdir()


def django(shop: Workshop) -> None:
    """A base with Python, and ten point releases of Django, each one layer over it."""
    layout = shop.layout("django")
    base = shop.base("python", ("python3",))
    _base_image(shop, "django", "base", base)
    for release in DJANGO_RELEASES:
        with trees.edit(base) as upper:
            trees.pip_install(upper, (f"django=={release}",), shop.log, target=SITE, compiled=True)
            layer = layers.add_layer(layout, upper, layers.difference(base, upper), f"pip install django=={release}")
        layout.tag(release, (*layout.layers("base"), layer), Cmd=["python3"])


def demo(shop: Workshop) -> None:
    """A base with Python, and a workspace of a few files."""
    layout = shop.layout("demo")
    base = shop.base("python", ("python3",))
    _base_image(shop, "demo", "base", base)
    with trees.edit(base) as upper:
        source = upper / "src"
        source.mkdir()
        (source / "primes.py").write_text(_PRIMES)
        (source / "test_primes.py").write_text(_TEST_PRIMES)
        (upper / "etc/motd").unlink()
        layer = layers.add_layer(layout, upper, layers.difference(base, upper), "COPY . /src")
    layout.tag("workspace", (*layout.layers("base"), layer), Cmd=["python3", "-m", "unittest"], WorkingDir="/src")


def small(shop: Workshop) -> None:
    """Some packages unpacked, and a layer over them with one of everything that a layer can say."""
    layout = shop.layout("small")
    base = shop.base("small", SMALL, variant="extract")
    _base_image(shop, "small", "base", base)
    with trees.edit(base) as upper:
        _one_of_everything(upper)
        content = layers.difference(base, upper, opaque=[b"usr/share/zoneinfo/Europe"])
        layer = layers.add_layer(layout, upper, content, "one of everything")
    layout.tag("changed", (*layout.layers("base"), layer), Cmd=["/bin/sh"], WorkingDir="/srv")


def _one_of_everything(tree: Path) -> None:
    shutil.rmtree(tree / "usr/share/zoneinfo/Africa")  # a whiteout of a directory
    (tree / "usr/share/zoneinfo/Zulu").unlink()  # of a file
    shutil.rmtree(tree / "usr/share/zoneinfo/Europe")  # replaced behind an opaque mark
    (tree / "usr/share/zoneinfo/Europe").mkdir()
    (tree / "usr/share/zoneinfo/Europe/Rome").write_bytes(b"TZif2")
    shutil.rmtree(tree / "usr/share/zoneinfo/Asia")  # a file, then a symlink, where directories were
    (tree / "usr/share/zoneinfo/Asia").write_text("nowhere\n")
    shutil.rmtree(tree / "usr/share/zoneinfo/Arctic")
    (tree / "usr/share/zoneinfo/Arctic").symlink_to("Antarctica")
    (tree / "usr/share/zoneinfo/UTC").unlink()  # a directory where a file was
    (tree / "usr/share/zoneinfo/UTC").mkdir()
    trees.replace(tree / "etc/debian_version", b"changed\n")
    srv = tree / "srv"
    srv.mkdir(exist_ok=True)
    (srv / "data").write_bytes(bytes(range(256)) * 1000)
    os.link(srv / "data", srv / "data.link")
    (srv / "loop").symlink_to("loop")
    os.link(srv / "loop", srv / "loop.link", follow_symlinks=False)
    (srv / "empty").touch()
    (srv / "empty.d").mkdir()
    os.mkfifo(srv / "fifo", 0o640)
    os.mknod(srv / "null", 0o020666, os.makedev(1, 3))
    os.mknod(srv / "disk", 0o060660, os.makedev(259, 1 << 12))  # numbers beyond 8 bits each
    (srv / ("long-" * 50)).write_bytes(b"a name over 100 bytes\n")
    with open(os.fsencode(srv) + b"/latin-\xe9\xff", "wb") as stream:
        stream.write(b"a name that is not UTF-8\n")
    os.setxattr(srv / "data", "user.note", b"\0\xff = value\n")
    os.setxattr(srv, "user.note", b"on a directory")
    ping = tree / "usr/bin/ping"
    trees.replace(ping, ping.read_bytes())
    # VFS_CAP_REVISION_2 with the effective flag, and CAP_NET_RAW (bit 13) permitted
    os.setxattr(ping, "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    (srv / "sticky").mkdir()
    os.chmod(srv / "sticky", 0o3777)
    (srv / "owned").write_bytes(b"by somebody else\n")
    os.chown(srv / "owned", 4_000_000_000, 3_000_000)
    os.chmod(srv / "owned", 0o6750)
    os.utime(srv / "owned", ns=(0, 1_500_000_000_123_456_789))
    (srv / "ancient").write_bytes(b"before 1970\n")
    os.utime(srv / "ancient", ns=(0, -1_500_000_001))


def _base_image(shop: Workshop, layout_name: str, tag: str, tree: Path) -> Layer:
    layout = shop.layout(layout_name)
    layer = layers.add_layer(layout, tree, layers.whole(tree), f"ADD {tree.name} /")
    layout.tag(tag, (layer,), Cmd=["/bin/sh"])
    return layer


def _add_sources(shop: Workshop, tree: Path, *, commits: int = 1) -> None:
    """Source trees below /src, each a git repository."""
    trees.pip_sources(tree / "src", SOURCES, shop.log)
    for project in sorted((tree / "src").iterdir()):
        project = project.rename(project.with_name(project.name.rpartition("-")[0].lower()))
        _commit(project, shop.log, commits)


def _commit(project: Path, log: Path, commits: int) -> None:
    """Make a source tree a git repository of so many commits, packed, the same on every run."""
    settings = ("user.name=builder", "user.email=builder@localhost", "gc.auto=0", "pack.threads=1")
    identity = [argument for setting in settings for argument in ("-c", setting)]
    files = [name for name in layers.walk(project) if not os.path.isdir(os.path.join(os.fsencode(project), name))]

    def git(*command: str, ago: int = 0) -> None:
        date = f"{layers.EPOCH - ago * 86_400} +0000"
        dated = ("env", f"GIT_AUTHOR_DATE={date}", f"GIT_COMMITTER_DATE={date}")
        trees.run([*dated, "git", *identity, "-C", str(project), *command], log)

    git("init", "-q", "--template=")
    for number in range(1, commits):
        with tempfile.NamedTemporaryFile() as listed:
            listed.write(b"\0".join(files[number - 1 :: commits]))
            listed.flush()
            git("--literal-pathspecs", "add", "-f", f"--pathspec-from-file={listed.name}", "--pathspec-file-nul")
        git("commit", "-q", "-m", f"Part {number} of {commits}", ago=commits - number)
    git("add", "-A", "-f")
    git("commit", "-q", "-m", "Import")
    git("gc", "-q")
    trees.settle(project / ".git")


def _script(path: Path, command: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


_PRIMES = textwrap.dedent(
    '''\
    """Prime numbers."""


    def primes(limit):
        """The primes below ``limit``."""
        return [n for n in range(2, limit) if all(n % d for d in range(2, int(n**0.5) + 1))]
    '''
)
_TEST_PRIMES = textwrap.dedent(
    """\
    import unittest

    from primes import primes


    class PrimesTest(unittest.TestCase):
        def test_first_primes(self):
            self.assertEqual(primes(20), [2, 3, 5, 7, 11, 13, 17, 19])
    """
)

RECIPES: dict[str, tuple[Callable[[Workshop], None], str, tuple[str, ...]]] = {
    "minbase": (minbase, "debian:minbase", ()),
    "full": (full, "debian:full", ("minbase",)),
    "changed": (changed, "debian:changed", ("full",)),
    "workspace": (workspace, "debian:workspace", ("full",)),
    "workloads": (workloads, "debian:workloads", ("minbase",)),
    "toolkit": (toolkit, "toolkit", ()),
    "django": (django, f"django:{DJANGO_RELEASES[-1]}", ()),
    "demo": (demo, "demo:workspace", ()),
    "small": (small, "small:changed", ()),
}
"""Per image its recipe, what exists once it is built (LAYOUT:TAG or a tree), and the images that it stands on."""
