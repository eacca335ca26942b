"""Layers applied to nothing: the whole tree of an image, as a base has it."""

from __future__ import annotations

import itertools
import stat

import pytest
from support.trees import Layer, at, content, directory_at, manifest, merged, names

from layerstore.errors import LimitError, MalformedError, UnsupportedError
from layerstore.limits import DEFAULT_LIMITS, Limits
from layerstore.tree.inode import Attrs, Directory, File, Special, Symlink, Whiteout, Xattrs, walk
from layerstore.tree.merge import Merge

DEFAULT = Attrs(stat.S_IFDIR | 0o755, 0, 0, 0, 0)


def assert_base(tree: Directory) -> None:
    """A whole tree has no marks of any kind."""
    for path, inode in walk(tree):
        assert not isinstance(inode, Whiteout), path
        assert not (isinstance(inode, Directory) and inode.opaque), path
        assert not path.rpartition(b"/")[2].startswith(b".wh."), path


# -- order and duplicates --------------------------------------------------------------------------------------------


@pytest.mark.case("T01")
@pytest.mark.parametrize("second", [b"B", b"A"])
def test_the_last_duplicate_wins_with_a_warning(second: bytes) -> None:
    warnings: list[str] = []
    tree = merged(Layer().file(b"foo", b"A").file(b"./foo", second), warnings=warnings)
    assert names(tree) == [b"foo"]
    assert content(at(tree, b"foo")) == second
    assert len(warnings) == 1 and "foo" in warnings[0] and "more than once" in warnings[0]


def test_duplicate_directories_warn_but_implied_ones_do_not() -> None:
    warnings: list[str] = []
    tree = merged(Layer().file(b"d/f").dir(b"d", 0o700), warnings=warnings)
    assert warnings == [] and at(tree, b"d").attrs.mode == stat.S_IFDIR | 0o700
    merged(Layer().dir(b"d").file(b"d/f").dir(b"d"), warnings=warnings)
    assert len(warnings) == 1


def test_other_layers_do_not_make_duplicates() -> None:
    warnings: list[str] = []
    merged(Layer().dir(b"d").file(b"d/f"), Layer().dir(b"d").file(b"d/f"), warnings=warnings)
    assert warnings == []


def test_warnings_of_a_layer_are_bounded() -> None:
    warnings: list[str] = []
    layer = Layer()
    for _ in range(501):
        layer.file(b"f")
    merged(layer, Layer().file(b"g").file(b"g"), warnings=warnings)
    assert len(warnings) == 102
    assert "400 more" in warnings[100]


@pytest.mark.case("T15")
def test_a_directory_named_again_keeps_its_content() -> None:
    tree = merged(
        Layer().dir(b"usr").dir(b"usr/bin").file(b"usr/bin/a"),
        Layer().dir(b"usr", 0o711, uid=3).dir(b"usr/bin", 0o700, mtime=5).file(b"usr/bin/b"),
    )
    assert names(tree) == [b"usr", b"usr/bin", b"usr/bin/a", b"usr/bin/b"]
    assert at(tree, b"usr").attrs == Attrs(stat.S_IFDIR | 0o711, 3, 0, 1000, 0)
    assert at(tree, b"usr/bin").attrs == Attrs(stat.S_IFDIR | 0o700, 0, 0, 5, 0)


@pytest.mark.case("T16")
def test_later_layers_replace_files() -> None:
    tree = merged(
        Layer().file(b"etc/passwd", b"1"), Layer().file(b"etc/passwd", b"2"), Layer().symlink(b"etc/passwd", b"x")
    )
    passwd = at(tree, b"etc/passwd")
    assert isinstance(passwd, Symlink) and passwd.target == b"x"


@pytest.mark.case("T18")
def test_a_symlink_becomes_a_directory() -> None:
    lower = Layer().dir(b"real").file(b"real/old").symlink(b"things", b"real")
    upper = Layer().file(b".wh.real").dir(b"things").file(b"things/x")
    assert names(merged(lower, upper)) == [b"things", b"things/x"]
    reordered = Layer().dir(b"things").file(b"things/x").file(b".wh.real")
    assert names(merged(lower, reordered)) == [b"things", b"things/x"]


@pytest.mark.case("T19")
@pytest.mark.parametrize("split", [False, True])
def test_a_directory_becomes_a_symlink(split: bool) -> None:
    one, two = Layer(), Layer()
    if not split:
        two = one
    one.dir(b"d").file(b"d/f")
    two.symlink(b"d", b"e")
    tree = merged(*dict.fromkeys((one, two)))
    assert names(tree) == [b"d"]
    assert isinstance(at(tree, b"d"), Symlink)


@pytest.mark.case("T20")
@pytest.mark.parametrize("split", [False, True])
def test_a_file_that_should_be_a_parent_becomes_a_directory(split: bool) -> None:
    warnings: list[str] = []
    layers = (
        [Layer().file(b"p", b"x"), Layer().file(b"p/q", b"q")] if split else [Layer().file(b"p", b"x").file(b"p/q")]
    )
    tree = merged(*layers, warnings=warnings)
    assert names(tree) == [b"p", b"p/q"]
    assert isinstance(at(tree, b"p"), Directory) and at(tree, b"p").attrs == DEFAULT
    assert len(warnings) == 1 and "p/q" in warnings[0]


# -- whiteouts -------------------------------------------------------------------------------------------------------


@pytest.mark.case("T04")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_opaque_applies_to_lower_layers_in_any_order(order: tuple[int, ...]) -> None:
    def add(layer: Layer, step: int) -> None:
        if step == 0:
            layer.dir(b"a/", 0o711)
        elif step == 1:
            layer.file(b"a/new", b"n")
        else:
            layer.file(b"a/.wh..wh..opq")

    upper = Layer()
    for step in order:
        add(upper, step)
    tree = merged(Layer().dir(b"a").file(b"a/old"), upper)
    assert names(tree) == [b"a", b"a/new"]
    assert at(tree, b"a").attrs.mode == stat.S_IFDIR | 0o711
    assert_base(tree)


@pytest.mark.case("T04")
def test_opaque_without_its_directory() -> None:
    tree = merged(Layer().dir(b"a", 0o700).file(b"a/old"), Layer().file(b"a/.wh..wh..opq"))
    assert names(tree) == [b"a"]
    assert at(tree, b"a").attrs.mode == stat.S_IFDIR | 0o700


@pytest.mark.case("T05")
def test_the_opaque_marker_is_no_whiteout_of_a_file() -> None:
    lower = Layer().file(b"foo/a").file(b"foo/b").file(b"foo/.wh-opq")
    tree = merged(lower, Layer().file(b"foo/.wh..wh..opq").file(b"foo/c"))
    assert names(tree) == [b"foo", b"foo/c"]


@pytest.mark.case("T04")
@pytest.mark.parametrize("marker_first", [True, False])
def test_what_a_layer_adds_survives_its_own_whiteouts(marker_first: bool) -> None:
    lower = Layer().dir(b"d", 0o700).file(b"d/old").dir(b"d/s", 0o700).file(b"d/s/old").file(b"f", b"old")
    upper = Layer()
    if marker_first:
        upper.file(b".wh.d").file(b".wh.f")
    upper.file(b"d/new").dir(b"d/t", 0o701).file(b"d/s/new").file(b"f", b"new")
    if not marker_first:
        upper.file(b".wh.d").file(b".wh.f")
    tree = merged(lower, upper)
    assert names(tree) == [b"d", b"d/new", b"d/s", b"d/s/new", b"d/t", b"f"]
    assert at(tree, b"d").attrs == at(tree, b"d/s").attrs == DEFAULT, "nothing is left of the lower directories"
    assert at(tree, b"d/t").attrs.mode == stat.S_IFDIR | 0o701
    assert content(at(tree, b"f")) == b"new"


@pytest.mark.parametrize("whiteout", [b".wh.d", b".wh..wh..opq"])
def test_opaque_keeps_attributes_only_until_the_directory_itself_goes(whiteout: bytes) -> None:
    lower = Layer().dir(b"d", 0o700).file(b"d/old")
    for markers in itertools.permutations([b"d/.wh..wh..opq", whiteout]):
        upper = Layer().file(b"d/new")
        for marker in markers:
            upper.file(marker)
        tree = merged(lower, upper)
        assert names(tree) == [b"d", b"d/new"] and at(tree, b"d").attrs == DEFAULT


def test_a_directory_that_only_markers_touched_is_still_removed() -> None:
    lower = Layer().file(b"d/e/x").file(b"d/e/y")
    for markers in itertools.permutations([b"d/e/.wh.x", b"d/.wh.e", b".wh.d", b"d/.wh..wh..opq"]):
        upper = Layer()
        for marker in markers:
            upper.file(marker)
        assert names(merged(lower, upper)) == []


def test_a_link_to_the_same_inode_again_survives_the_whiteout_of_its_name() -> None:
    lower = Layer().file(b"a", b"x").hardlink(b"b", b"a")
    tree = merged(lower, Layer().hardlink(b"b", b"a").file(b".wh.b"))
    assert names(tree) == [b"a", b"b"]
    assert at(tree, b"a") is at(tree, b"b")
    assert names(merged(lower, Layer().hardlink(b"b", b"a"), Layer().file(b".wh.b"))) == [b"a"]


def test_a_replaced_name_survives_but_its_old_content_does_not() -> None:
    lower = Layer().file(b"x/old").file(b"y", b"1")
    tree = merged(lower, Layer().file(b"x", b"f").dir(b"x").file(b"y", b"2").file(b".wh.x").file(b".wh.y"))
    assert names(tree) == [b"x", b"y"]
    assert content(at(tree, b"y")) == b"2"


@pytest.mark.case("T11", "T12")
def test_whiteouts_of_what_is_not_there() -> None:
    layer = Layer().file(b".wh.ghost").file(b"no/such/.wh.dir").file(b"home/.wh.changelog.txt").file(b"home/a")
    tree = merged(layer)
    assert names(tree) == [b"home", b"home/a"]
    assert_base(tree)
    tree = merged(Layer().file(b"f"), Layer().file(b"f/.wh.x").file(b"f/.wh..wh..opq").file(b"g/.wh..wh..opq"))
    assert names(tree) == [b"f"] and isinstance(at(tree, b"f"), File), "a marker makes nothing"


@pytest.mark.case("T08", "T59")
@pytest.mark.parametrize("name", [b".wh.", b"etc/.wh.", b".wh..", b".wh...", b"etc/.wh...", b"etc/.wh../x"])
def test_whiteouts_of_no_name_are_refused(name: bytes) -> None:
    with pytest.raises(MalformedError, match="whiteout") as caught:
        merged(Layer().file(b"etc/old"), Layer().file(b"etc/config.txt").file(name))
    assert name.decode() in str(caught.value)
    assert caught.value.offset == 512


@pytest.mark.case("T13")
@pytest.mark.parametrize("form", ["hardlink", "symlink", "directory", "with a body", "device"])
def test_a_whiteout_is_one_by_its_name_alone(form: str) -> None:
    upper = Layer()
    if form == "hardlink":
        upper.hardlink(b"tmp/.wh.key", b"tmp/repo")
    elif form == "symlink":
        upper.symlink(b"tmp/.wh.key", b"repo")
    elif form == "directory":
        upper.dir(b"tmp/.wh.key/")
    elif form == "device":
        upper.device(b"tmp/.wh.key", stat.S_IFCHR, 0, 0)
    else:
        upper.file(b"tmp/.wh.key", b"0123456789")
    assert names(merged(Layer().file(b"tmp/key").file(b"tmp/other"), upper)) == [b"tmp", b"tmp/other"]


def test_what_lies_inside_a_whiteout_is_left_out() -> None:
    warnings: list[str] = []
    tree = merged(Layer().file(b"d/x"), Layer().dir(b".wh.d").file(b".wh.d/y"), warnings=warnings)
    assert names(tree) == []
    assert len(warnings) == 1 and ".wh.d/y" in warnings[0]


@pytest.mark.case("O10")
def test_a_root_whiteout_hides_in_the_root_only() -> None:
    lower = Layer().file(b"test").file(b"root/test").file(b"a/b/test")
    assert names(merged(lower, Layer().file(b".wh.test"))) == [b"a", b"a/b", b"a/b/test", b"root", b"root/test"]


def test_an_opaque_root() -> None:
    lower = Layer().dir(b".", 0o711).file(b"a").file(b"d/x")
    tree = merged(lower, Layer().file(b"d/y").file(b".wh..wh..opq"))
    assert names(tree) == [b"d", b"d/y"]
    assert tree.attrs.mode == stat.S_IFDIR | 0o711


@pytest.mark.case("T07")
def test_aufs_metadata_is_left_out_but_serves_links() -> None:
    layer = (
        Layer()
        .file(b".wh..wh.aufs")
        .dir(b".wh..wh.orph/")
        .dir(b".wh..wh.plnk/")
        .file(b".wh..wh.plnk/12.34", b"kept aside", uid=7)
        .hardlink(b"x", b".wh..wh.plnk/12.34")
        .hardlink(b"y", b".wh..wh.plnk/12.34")
        .hardlink(b"z", b".wh..wh.plnk/56.78")
        .file(b".wh..wh.plnk/56.78", b"later")
        .file(b"sub/.wh..wh.xyz")
    )
    tree = merged(layer)
    assert names(tree) == [b"x", b"y", b"z"]
    assert content(at(tree, b"x")) == b"kept aside" and at(tree, b"x").attrs.uid == 7
    assert at(tree, b"x") is at(tree, b"y")
    assert content(at(tree, b"z")) == b"later"
    with pytest.raises(MalformedError, match="neither"):
        merged(layer, Layer().hardlink(b"w", b".wh..wh.plnk/12.34"))


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("T22", "T40")
@pytest.mark.parametrize("name", [b".", b"./", b"/", b"", b"././", b".."])
def test_directories_that_name_the_root_set_its_attributes(name: bytes) -> None:
    tree = merged(Layer().file(b"a").dir(name, 0o1777, uid=9, mtime=77).symlink(b"link", b"nowhere"))
    assert tree.attrs == Attrs(stat.S_IFDIR | 0o1777, 9, 0, 77, 0)
    assert names(tree) == [b"a", b"link"]


@pytest.mark.case("T22", "T40")
@pytest.mark.parametrize("name", [b"", b".", b"/", b"./", b"a/.."])
@pytest.mark.parametrize("form", ["symlink", "hardlink", "file"])
def test_nothing_else_may_name_the_root(name: bytes, form: str) -> None:
    layer = Layer().file(b"a")
    if form == "symlink":
        layer.symlink(name, b"/")
    elif form == "hardlink":
        layer.hardlink(name, b".")
    else:
        layer.file(name)
    with pytest.raises(MalformedError, match="root"):
        merged(layer)


def test_a_root_without_attributes() -> None:
    assert merged(Layer()).attrs == DEFAULT
    assert at(merged(Layer().file(b"p/q/r")), b"p/q").attrs == DEFAULT


@pytest.mark.case("T59")
def test_no_name_leaves_the_root() -> None:
    tree = merged(
        Layer()
        .file(b"../e", b"1")
        .file(b"/abs", b"2")
        .file(b"a/../../f", b"3")
        .file(b"a/./b//c", b"4")
        .dir(b"..", 0o700)
        .symlink(b"p", b"/outside")
        .file(b"p/f", b"5")
        .file(b"back\\slash", b"6")
    )
    assert names(tree) == [
        *(b"a", b"a/b", b"a/b/c", b"abs", b"back\\slash", b"e", b"f", b"outside", b"outside/f", b"p")
    ]
    assert isinstance(at(tree, b"p"), Symlink)
    assert content(at(tree, b"outside/f")) == b"5"
    assert tree.attrs.mode == stat.S_IFDIR | 0o700


@pytest.mark.case("T59", "T21")
def test_whiteouts_follow_symlinked_parents_inside_the_image() -> None:
    lower = Layer().file(b"outside/f").file(b"outside/g").symlink(b"p", b"../../outside")
    assert names(merged(lower, Layer().file(b"p/.wh.f"))) == [b"outside", b"outside/g", b"p"]
    assert names(merged(lower, Layer().file(b"p/.wh..wh..opq"))) == [b"outside", b"p"]
    with pytest.raises(MalformedError):
        merged(lower, Layer().file(b"p/.wh..."))


@pytest.mark.case("T21")
def test_a_symlinked_parent_is_followed() -> None:
    lower = Layer().dir(b"usr/lib64", 0o700).file(b"usr/lib64/a").symlink(b"lib64", b"usr/lib64")
    tree = merged(lower, Layer().file(b"lib64/b", b"new").file(b"lib64/c"))
    assert names(tree) == [b"lib64", b"usr", b"usr/lib64", b"usr/lib64/a", b"usr/lib64/b", b"usr/lib64/c"]
    assert isinstance(at(tree, b"lib64"), Symlink)
    assert at(tree, b"usr/lib64").attrs.mode == stat.S_IFDIR | 0o700


@pytest.mark.case("T21")
def test_the_parent_is_looked_up_again_when_a_link_has_changed() -> None:
    tree = merged(
        Layer()
        .dir(b"x")
        .dir(b"y")
        .symlink(b"l", b"x")
        .file(b"l/1")
        .symlink(b"l", b"y")
        .file(b"l/2")
        .dir(b"l")
        .file(b"l/3")
    )
    assert names(tree) == [b"l", b"l/3", b"x", b"x/1", b"y", b"y/2"]
    tree = merged(Layer().file(b"d/1").file(b"d").file(b"d/2"))
    assert names(tree) == [b"d", b"d/2"]
    tree = merged(Layer().file(b"d/0"), Layer().file(b"d/1").file(b".wh.d").file(b"d/2"))
    assert names(tree) == [b"d", b"d/1", b"d/2"]
    tree = merged(Layer().file(b"a/b/1").file(b"a").file(b"a/b/2"))
    assert names(tree) == [b"a", b"a/b", b"a/b/2"]


@pytest.mark.case("T21")
@pytest.mark.parametrize("target", [b"a", b"/a", b"../a/.", b"b", b"a/x"])
def test_symlink_loops_are_refused(target: bytes) -> None:
    with pytest.raises(MalformedError, match="loop"):
        merged(Layer().symlink(b"a", target).symlink(b"b", b"a").file(b"a/f"))


def test_a_parent_behind_a_link_is_made() -> None:
    tree = merged(Layer().symlink(b"l", b"/var/run/x").file(b"l/f"), Layer().file(b"l/g"))
    assert names(tree) == [b"l", b"var", b"var/run", b"var/run/x", b"var/run/x/f", b"var/run/x/g"]


def test_a_link_can_not_imply_what_no_directory_holds() -> None:
    with pytest.raises(MalformedError, match="255"):
        merged(Layer().symlink(b"l", b"n" * 256).file(b"l/f"))


def test_names_keep_their_bytes() -> None:
    odd = [b"caf\xe9", b"x\xff\xfe", b"a\\b", b"new\nline", b"-", b"~", b" "]
    layer = Layer()
    for name in odd:
        layer.file(b"d/" + name)
    assert sorted(directory_at(merged(layer), b"d").entries) == sorted(odd)


# -- hard links ------------------------------------------------------------------------------------------------------


@pytest.mark.case("T03")
def test_a_link_given_twice_counts_once() -> None:
    tree = merged(Layer().file(b"a", b"x").hardlink(b"b", b"a").hardlink(b"b", b"a"))
    assert manifest(tree)[b"b"].links == {b"a", b"b"}
    assert at(tree, b"a") is at(tree, b"b")


@pytest.mark.case("T24")
def test_a_link_before_its_target() -> None:
    tree = merged(Layer().hardlink(b"d/c", b"b").hardlink(b"b", b"a").file(b"a", b"abc"))
    assert names(tree) == [b"a", b"b", b"d", b"d/c"]
    assert at(tree, b"a") is at(tree, b"b") is at(tree, b"d/c")
    assert content(at(tree, b"b")) == b"abc"


@pytest.mark.case("T24")
def test_links_that_lead_nowhere_are_refused() -> None:
    for layer in (
        Layer().hardlink(b"b", b"a"),
        Layer().hardlink(b"b", b"b"),
        Layer().hardlink(b"b", b"c").hardlink(b"c", b"b"),
        Layer().hardlink(b"b", b".wh.x").file(b".wh.x"),
    ):
        with pytest.raises(MalformedError, match="hard link"):
            merged(layer)


def test_a_pending_link_that_is_replaced_does_not_matter() -> None:
    tree = merged(Layer().hardlink(b"b", b"gone").file(b"b", b"x").hardlink(b"d/c", b"gone").file(b"d"))
    assert names(tree) == [b"b", b"d"]
    assert content(at(tree, b"b")) == b"x"
    tree = merged(Layer().hardlink(b"d/c", b"d/x").symlink(b"d", b"d").hardlink(b"e/c", b"f").file(b"e").dir(b"f"))
    assert names(tree) == [b"d", b"e", b"f"]


def test_a_link_gets_what_is_there_when_it_is_read() -> None:
    tree = merged(Layer().file(b"a", b"old"), Layer().hardlink(b"b", b"a").file(b"a", b"new"))
    assert content(at(tree, b"b")) == b"old" and content(at(tree, b"a")) == b"new"
    tree = merged(Layer().file(b"a", b"old"), Layer().hardlink(b"b", b"a").file(b".wh.a"))
    assert names(tree) == [b"b"] and content(at(tree, b"b")) == b"old"


@pytest.mark.case("T27")
def test_a_link_to_a_symlink_is_that_symlink() -> None:
    layer = Layer().file(b"t", b"target").symlink(b"a/l", b"../t").hardlink(b"b/l", b"a/l")
    tree = merged(layer.device(b"c", stat.S_IFCHR, 5, 1).hardlink(b"c2", b"c"))
    assert isinstance(at(tree, b"b/l"), Symlink)
    assert manifest(tree)[b"b/l"].links == {b"a/l", b"b/l"}
    assert isinstance(at(tree, b"c2"), Special) and at(tree, b"c") is at(tree, b"c2")


@pytest.mark.case("T29")
def test_links_share_one_inode() -> None:
    layer = Layer().file(b"f", bytes(4096))
    for name in (b"g", b"h", b"i"):
        layer.hardlink(name, b"f")
    assert manifest(merged(layer))[b"h"].links == {b"f", b"g", b"h", b"i"}


def test_the_attributes_of_a_link_header_are_ignored() -> None:
    tree = merged(Layer().file(b"a", b"", 0o600).hardlink(b"b", b"a", 0o777))
    assert at(tree, b"b").attrs.mode == stat.S_IFREG | 0o600


def test_link_targets_are_found_like_members() -> None:
    tree = merged(Layer().file(b"d/a").symlink(b"l", b"d").hardlink(b"b", b"/./l/../l/a").hardlink(b"c", b"l/a"))
    assert at(tree, b"c") is at(tree, b"d/a")
    assert b"b" in names(tree)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("target", [b"d", b".", b"/"])
def test_a_link_to_a_directory_is_refused(target: bytes, early: bool) -> None:
    layer = Layer()
    if early:
        layer.dir(b"d").hardlink(b"b", target)
    else:
        layer.hardlink(b"b", target).dir(b"d")
    with pytest.raises(MalformedError, match="directory"):
        merged(layer)


# -- kinds, attributes, limits ---------------------------------------------------------------------------------------


@pytest.mark.case("T57")
def test_a_device_that_is_a_whiteout_is_refused() -> None:
    with pytest.raises(MalformedError, match="var/lib/x") as caught:
        merged(Layer().file(b"var/lib/x"), Layer().dir(b"var").device(b"var/lib/x", stat.S_IFCHR, 0, 0))
    assert caught.value.offset == 512
    tree = merged(Layer().device(b"b", stat.S_IFBLK, 0, 0).device(b"c", stat.S_IFCHR, 4095, 1048575))
    device = at(tree, b"c")
    assert isinstance(device, Special) and (device.major, device.minor) == (4095, 1048575)


@pytest.mark.case("T37", "T57", "O08")
def test_overlay_xattrs_are_escaped() -> None:
    warnings: list[str] = []
    layer = (
        Layer()
        .dir(b"d", xattrs=((b"trusted.overlay.opaque", b"y"),))
        .file(b"d/f", xattrs=((b"security.capability", b"\1"), (b"trusted.overlay.metacopy", b""), (b"user.z", b"1")))
        .dir(b"e", xattrs=((b"trusted.overlay.redirect", b"/etc"),))
        .dir(b"g", xattrs=((b"user.overlay.opaque", b"y"),))
        .file(b"h", xattrs=((b"trusted.overlay.whiteout", b""),))
        .file(b"i", xattrs=((b"trusted.overlay.overlay.whiteout", b""),))
        .file(b"j", xattrs=((b"trusted.overlay.overlay.whiteout", b""),))
    )
    tree = merged(Layer().dir(b"d").file(b"d/old"), layer, warnings=warnings)
    assert b"d/old" in names(tree) and not directory_at(tree, b"d").opaque and not directory_at(tree, b"g").opaque
    assert at(tree, b"d").attrs.xattrs == ((b"trusted.overlay.overlay.opaque", b"y"),)
    assert at(tree, b"d/f").attrs.xattrs == (
        (b"security.capability", b"\1"),
        (b"trusted.overlay.overlay.metacopy", b""),
        (b"user.z", b"1"),
    )
    assert at(tree, b"e").attrs.xattrs == ((b"trusted.overlay.overlay.redirect", b"/etc"),)
    assert at(tree, b"g").attrs.xattrs == ((b"user.overlay.opaque", b"y"),)
    assert at(tree, b"h").attrs.xattrs == ((b"trusted.overlay.overlay.whiteout", b""),)
    assert at(tree, b"i").attrs.xattrs == at(tree, b"j").attrs.xattrs
    assert at(tree, b"j").attrs.xattrs == ((b"trusted.overlay.overlay.overlay.whiteout", b""),)
    assert len(warnings) == 6 and all("trusted.overlay" in line for line in warnings)
    with pytest.raises(MalformedError, match="xattr"):
        merged(Layer().file(b"k", xattrs=((b"trusted.overlay." + b"n" * 239, b""),)))


def test_xattrs_that_linux_does_not_store_are_left_out() -> None:
    warnings: list[str] = []
    acl = (b"system.posix_acl_access", b"\2\0\0\0")
    others = [(b"com.apple.provenance", b"\1"), (b"system.nfs4_acl", b"x"), (b"user.", b"x")]
    layer = Layer().file(b"f", xattrs=tuple(sorted([acl, (b"user.mine", b"1"), *others])))
    tree = merged(layer, warnings=warnings)
    assert at(tree, b"f").attrs.xattrs == (acl, (b"user.mine", b"1"))
    assert len(warnings) == 3 and all(line.startswith("f: xattr ") for line in warnings)


def test_equal_xattrs_are_one_object() -> None:
    def xattrs() -> Xattrs:
        return ((bytes(bytearray(b"security.selinux")), bytes(bytearray(b"label"))),)

    tree = merged(
        Layer().file(b"a", xattrs=xattrs()).file(b"b", mode=0o644, xattrs=xattrs()), Layer().file(b"c", xattrs=xattrs())
    )
    assert at(tree, b"a").attrs.xattrs is at(tree, b"b").attrs.xattrs is at(tree, b"c").attrs.xattrs


@pytest.mark.case("Z19")
def test_nothing_is_too_empty_to_be_kept() -> None:
    layer = (
        Layer()
        .dir(b"docker-entrypoint-initdb.d")
        .file(b"empty")
        .symlink(b"dangling", b"/no/where")
        .dir(b"marks")
        .file(b"marks/.wh.x")
        .add(b"pipe", stat.S_IFIFO)
        .add(b"sock", stat.S_IFSOCK)
    )
    rows = manifest(merged(layer))
    assert list(rows) == [b"", b"dangling", b"docker-entrypoint-initdb.d", b"empty", b"marks", b"pipe", b"sock"]
    assert rows[b"empty"].value == b"" and rows[b"dangling"].value == b"/no/where"


def test_holes_are_kept() -> None:
    layer = Layer().file(b"whole", b"0123456789")
    runs = (layer.members[0].data[0]._replace(offset=4096, length=4), layer.members[0].data[0]._replace(offset=9000))
    layer.add(b"sparse", stat.S_IFREG, size=1 << 40, data=runs)
    sparse = at(merged(layer), b"sparse")
    assert isinstance(sparse, File) and sparse.size == 1 << 40
    assert [(e.offset, e.length, e.at, e.source) for e in sparse.extents] == [
        (4096, 4, 0, layer),
        (9000, 10, 0, layer),
    ]


def test_ids_and_times_pass_through() -> None:
    layer = Layer().add(b"f", stat.S_IFREG, 0o6755, uid=4294967294, gid=65536, mtime=-(2**63), nsec=999_999_999)
    assert at(merged(layer), b"f").attrs == Attrs(stat.S_IFREG | 0o6755, 4294967294, 65536, -(2**63), 999_999_999)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="odd"):
        merged(Layer().add(b"odd", 0o150000))


def test_entries_are_limited() -> None:
    layer = Layer().file(b"a").file(b"b")
    assert len(names(merged(layer, Layer().file(b"c"), limits=Limits(entries=3)))) == 3
    with pytest.raises(LimitError, match="3 entries"):
        merged(layer, Layer().file(b"c").file(b"a"), limits=Limits(entries=3))
    with pytest.raises(LimitError):
        merged(Layer().file(b"1/2/3/4/5").file(b"x"), limits=Limits(entries=5))


def test_depth_is_not_bounded_by_the_stack() -> None:
    """Symlinks lead deeper than any name could."""
    layer = Layer()
    for _ in range(3):
        layer.symlink(b"l", b"d/" * 2000).file(b"l/" + b"d/" * 2000 + b"x")
        layer.symlink(b"l", b"d/" * 2000 + b"x").file(b"l/y")
    lower = merged(layer)
    assert max(path.count(b"/") for path, _ in walk(lower)) == 4000
    assert names(merged(Layer().file(b"l/.wh.y").file(b".wh.d"), lower=lower)) == [b"d"]


def test_a_returned_tree_is_not_changed_by_later_layers() -> None:
    merge = Merge(warn=[].append, limits=DEFAULT_LIMITS)
    one = Layer().file(b"d/a", b"1").file(b"e/f/g")
    two = Layer().file(b"d/a", b"2").file(b".wh.e").dir(b"d", 0o700).dir(b"", 0o700)
    merge.apply(one.members, one)
    first = merge.tree()
    before = manifest(first)
    merge.apply(two.members, two)
    assert manifest(first) == before
    assert manifest(merge.tree()) == manifest(merged(one, two))
