"""Random layers: Merge against a model that keeps one table of paths, and stacks cut at every point.

The model shares nothing with the product but the names of the classes that it reads results from. It keeps a dict of
path to entry, applies members one by one and scans the whole dict for everything it wants to know.
"""

from __future__ import annotations

import random
import stat
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import Layer, clone, manifest, merged, same_content

from layerstore.errors import MalformedError
from layerstore.tree.difference import delta, difference
from layerstore.tree.inode import Attrs, Directory, Whiteout, walk
from layerstore.tree.union import listed_whiteouts, merge_overlay

SETTINGS = settings(deadline=None, max_examples=100)

IMPLIED = Attrs(stat.S_IFDIR | 0o755, 0, 0, 0, 0)

# -- layers -----------------------------------------------------------------------------------------------------------

component = st.sampled_from(["a", "b", "c"])
path = st.lists(component, min_size=1, max_size=4).map("/".join)
target = st.sampled_from(["a", "b", "/c", "../a", "a/b", "..", "/", "/b/c", "../../b/./c", "a/../b"])
mode = st.sampled_from([0o700, 0o755])


@dataclass(frozen=True)
class Step:
    """One member to be: what it does, where, and with what."""

    verb: str
    path: str
    mode: int
    target: str
    link: str
    aim: int

    def put(self, layer: Layer, serial: int) -> None:
        name = self.path.encode()
        head, _, last = self.path.rpartition("/")
        prefix = head + "/" if head else ""
        match self.verb:
            case "dir":
                layer.dir(name, self.mode)
            case "root":
                layer.dir(b"./", self.mode)
            case "file":
                layer.file(name, b"%d" % serial, self.mode)
            case "symlink":
                layer.symlink(name, self.target.encode())
            case "link":
                layer.hardlink(name, self.link.encode())
            case "whiteout":
                layer.file(f"{prefix}.wh.{last}".encode())
            case "opaque":
                layer.file(f"{prefix}.wh..wh..opq".encode())


verb = st.sampled_from(
    ["dir", "dir", "file", "file", "file", "file", "symlink", "link", "whiteout", "whiteout", "opaque", "root"]
)
steps = st.builds(Step, verb, path, mode, target, path, st.integers(0, 99))


def aimed(stack: list[list[Step]]) -> list[list[Step]]:
    """Four of five links go to where some member puts a non-directory: most random ones lead nowhere."""
    files = [step for layer in stack for step in layer if step.verb in ("file", "symlink", "link")]

    def aim(step: Step) -> Step:
        if step.verb != "link" or step.aim < 20:
            return step
        return replace(step, link=files[step.aim % len(files)].path)

    return [[aim(step) for step in layer] for layer in stack]


stacks = st.lists(st.lists(steps, min_size=1, max_size=8), min_size=1, max_size=4).map(aimed)


def build(stack: list[list[Step]]) -> list[Layer]:
    layers: list[Layer] = []
    for number, members in enumerate(stack):
        layer = Layer()
        for index, step in enumerate(members):
            step.put(layer, 100 * number + index)
        layers.append(layer)
    return layers


# -- the model --------------------------------------------------------------------------------------------------------


class Refused(Exception):
    pass


@dataclass(eq=False)
class Thing:
    """An inode. ``value`` is a content or target; a ``waiting`` one is a link whose target is to come."""

    attrs: Attrs
    value: object = None
    waiting: str | None = None

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.attrs.mode)


class Model:
    def __init__(self) -> None:
        self.table: dict[str, Thing] = {"": Thing(IMPLIED)}

    def is_dir(self, path: str) -> bool:
        thing = self.table.get(path)
        return thing is not None and thing.waiting is None and thing.kind == stat.S_IFDIR

    def real(self, parts: list[str], links: int = 0) -> str:
        """``parts`` without symlinks."""
        done: list[str] = []
        for index, part in enumerate(parts):
            if part in ("", "."):
                continue
            if part == "..":
                done = done[:-1]
                continue
            here = "/".join([*done, part])
            thing = self.table.get(here)
            if thing is None or thing.waiting is not None or thing.kind != stat.S_IFLNK:
                done.append(part)
                continue
            if links == 40:
                raise Refused("loop")
            assert isinstance(thing.value, str)
            start = [] if thing.value.startswith("/") else done
            return self.real([*start, *thing.value.split("/"), *parts[index + 1 :]], links + 1)
        return "/".join(done)

    def inside(self, top: str) -> list[str]:
        return [p for p in self.table if p != top and (top == "" or p.startswith(top + "/"))]

    def remove(self, top: str) -> None:
        for p in [top, *self.inside(top)]:
            self.table.pop(p, None)
            self.mine.discard(p)
            self.declared.discard(p)

    def parent(self, path: str) -> str:
        """Make the directories above; returns the path with its parent's symlinks followed."""
        *above, last = path.split("/")
        top = self.real(above)
        parts = top.split("/") if top else []
        for depth in range(1, len(parts) + 1):
            here = "/".join(parts[:depth])
            if not self.is_dir(here):
                self.remove(here)
                self.table[here] = Thing(IMPLIED)
            self.mine.add(here)
        return "/".join([*parts, last])

    def apply(self, layer: list[Step], serial: int) -> None:
        self.mine: set[str] = {""}
        self.declared: set[str] = {""}
        for index, step in enumerate(layer):
            self.member(step, serial + index)
        for p in list(self.table):
            if self.table[p].waiting is not None:
                self.table[p] = self.resolved(self.table[p], [])

    def resolved(self, thing: Thing, seen: list[Thing]) -> Thing:
        if thing.waiting is None:
            return thing
        if thing in seen:
            raise Refused("circle")
        found = self.target(thing.waiting)
        if found is None:
            raise Refused("dangling")
        return self.resolved(found, [*seen, thing])

    def target(self, path: str) -> Thing | None:
        *above, last = path.split("/")
        top = self.real(above)
        if not self.is_dir(top):
            return None
        p = f"{top}/{last}" if top else last
        if self.is_dir(p):
            raise Refused("link to a directory")
        return self.table.get(p)

    def member(self, step: Step, serial: int) -> None:
        file = Attrs(stat.S_IFREG | step.mode, 0, 0, 1000, 0)
        directory = Attrs(stat.S_IFDIR | step.mode, 0, 0, 1000, 0)
        if step.verb == "root":
            self.table[""].attrs = directory
            return
        if step.verb in ("whiteout", "opaque"):
            *above, last = step.path.split("/")
            top = self.real(above)
            if not self.is_dir(top):
                return
            if step.verb == "whiteout":
                top = f"{top}/{last}" if top else last
            doomed = [top, *self.inside(top)] if step.verb == "whiteout" else self.inside(top)
            for p in doomed:
                if p not in self.mine:
                    self.table.pop(p, None)
                elif self.is_dir(p) and p not in self.declared:
                    self.table[p] = Thing(IMPLIED)
            return
        p = self.parent(step.path)
        if step.verb == "dir" and self.is_dir(p):
            self.table[p] = Thing(directory)
        else:
            match step.verb:
                case "dir":
                    new = Thing(directory)
                case "file":
                    new = Thing(file, b"%d" % serial)
                case "symlink":
                    new = Thing(Attrs(stat.S_IFLNK | 0o777, 0, 0, 1000, 0), step.target)
                case _:
                    found = self.target(step.link)
                    new = Thing(IMPLIED, waiting=step.link) if found is None else found
            self.remove(p)
            self.table[p] = new
        self.mine.add(p)
        self.declared.add(p)

    def rows(self) -> dict[bytes, tuple[Attrs, object, frozenset[bytes] | None]]:
        names: dict[int, set[bytes]] = {}
        for p, thing in self.table.items():
            names.setdefault(id(thing), set()).add(p.encode())
        return {
            p.encode(): (
                thing.attrs,
                thing.value.encode() if isinstance(thing.value, str) else thing.value,
                frozenset(names[id(thing)]) if len(names[id(thing)]) > 1 else None,
            )
            for p, thing in self.table.items()
        }


def modelled(stack: list[list[Step]]) -> dict[bytes, tuple[Attrs, object, frozenset[bytes] | None]] | None:
    """What the model makes of the layers; None when it refuses them."""
    model = Model()
    try:
        for number, layer in enumerate(stack):
            model.apply(layer, 100 * number)
    except Refused:
        return None
    return model.rows()


def applied(layers: list[Layer], lower: Directory | None = None) -> Directory | None:
    try:
        return merged(*layers, lower=lower)
    except MalformedError:
        return None


# -- stacks that are mostly accepted ----------------------------------------------------------------------------------


def dense(seed: int) -> list[list[Step]]:
    """Layers full of members in a small tree, thinned out until the model takes them; one in ten is left as it is."""
    rng = random.Random(seed)
    weights = {"dir": 3, "file": 5, "symlink": 1, "link": 3, "whiteout": 3, "opaque": 2, "root": 0.3}

    def step() -> Step:
        return Step(
            verb=rng.choices([*weights], [*weights.values()])[0],
            path="/".join(rng.choices("ab" if rng.random() < 0.8 else "abc", k=rng.choice([1, 1, 2, 2, 2, 3]))),
            mode=rng.choice([0o700, 0o755]),
            target=rng.choice(["a", "b", "/c", "../a", "a/b", "..", "/b/c"]),
            link="/".join(rng.choices("ab", k=rng.choice([1, 2]))),
            aim=rng.randrange(100),
        )

    stack = aimed([[step() for _ in range(rng.randint(2, 9))] for _ in range(rng.randint(2, 4))])
    if seed % 10 == 0:
        return stack
    while modelled(stack) is None:
        layer = rng.choice([layer for layer in stack if layer])
        suspects = [step for step in layer if step.verb in ("link", "symlink")] or layer
        layer.remove(rng.choice(suspects))
    return stack


any_stack = st.one_of(stacks, st.integers(0, 2**32).map(dense), st.integers(0, 2**32).map(dense))

# -- properties -------------------------------------------------------------------------------------------------------


def check_model(stack: list[list[Step]]) -> None:
    """Merge makes what the model makes, or both refuse."""
    tree = applied(build(stack))
    expected = modelled(stack)
    if tree is None or expected is None:
        assert tree is None and expected is None
        return
    rows = manifest(tree)
    assert {p: (row.attrs, row.value, row.links) for p, row in rows.items()} == expected
    assert not any(row.opaque or row.type == "Whiteout" for row in rows.values())


def check_cuts(stack: list[list[Step]]) -> None:
    """Three roles, cut from a stack at any two points, show together what the whole stack shows."""
    layers = build(stack)
    tree = applied(layers)
    if tree is None:
        return
    whole = manifest(tree)
    for first in range(len(layers)):
        bottom = clone(merged(*layers[:first]))
        before = manifest(bottom)
        for second in range(first + 1, len(layers) + 1):
            middle = clone(merged(*layers[first:second], lower=bottom))
            check_delta(bottom, middle)
            below = merge_overlay([bottom, middle])
            top = clone(merged(*layers[second:], lower=below))
            check_delta(below, top)
            assert manifest(merge_overlay([bottom, middle, top])) == whole
            assert list(listed_whiteouts([bottom, middle, top])) == []
        assert manifest(bottom) == before


@SETTINGS
@given(any_stack)
def test_merge_equals_the_model(stack: list[list[Step]]) -> None:
    check_model(stack)


@SETTINGS
@given(any_stack)
def test_a_stack_cut_anywhere_shows_the_same(stack: list[list[Step]]) -> None:
    check_cuts(stack)


@pytest.mark.parametrize("tens", range(30))
def test_dense_layers(tens: int) -> None:
    """Rare meetings of markers and members, which need many members in few places."""
    for seed in range(10 * tens, 10 * tens + 10):
        check_model(dense(seed))
        check_cuts(dense(seed))


@SETTINGS
@given(any_stack, any_stack)
def test_a_delta_makes_one_tree_of_the_other(one: list[list[Step]], two: list[list[Step]]) -> None:
    lower, upper = applied(build(one)), applied(build([*one, *two]))
    other = applied(build(two))
    for old in filter(None, (lower, other)):
        for new in filter(None, (upper, other)):
            layer = clone(delta(clone(old), clone(new), same_content))
            check_delta(old, layer)
            shown = merge_overlay([old, layer])
            assert manifest(shown) == manifest(new)
            assert list(difference(shown, new, same_content)) == []
            assert (manifest(old) == manifest(new)) == (not list(difference(old, new, same_content)))


def check_delta(lower: Directory, layer: Directory) -> None:
    """A mark is only where the lower shows something to be hidden."""
    assert not layer.opaque
    visible = dict(walk(lower))
    cut: list[bytes] = []
    for p, inode in walk(layer):
        hidden = any(p.startswith(top + b"/") for top in cut)
        under = None if hidden else visible.get(p)
        if isinstance(inode, Whiteout):
            assert under is not None, p
        if isinstance(inode, Directory):
            if inode.opaque:
                assert isinstance(under, Directory), p
            if inode.opaque or not isinstance(under, Directory):
                cut.append(p)
