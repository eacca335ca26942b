from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import UsageError
from overlay.layerkey import (
    is_digest,
    is_key,
    is_recorded,
    is_variant,
    join_key,
    plain_key,
    plain_variant,
    recorded_variant,
    recorder_in_path,
    split_key,
)
from overlay.layers import LayerMounts, MountableLayer

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize("variant", ["", "direct", "fuse", "fuse-2", "fuse.12", "a", "0", "x" * 64, "a.b-c.d"])
def test_a_key_is_a_digest_and_perhaps_a_variant(variant: str) -> None:
    layer = MountableLayer(HEX, "/image", (), variant)
    assert layer.key == (f"{HEX}.{variant}" if variant else HEX)
    assert is_key(layer.key)
    assert split_key(layer.key) == (HEX, variant)


@pytest.mark.parametrize(
    "variant", [".", "..", "a.", ".a", "-a", "a-", "a..b", "a-.b", "A", "a/b", "a b", "é", "a\n", "\n", "x" * 65, "٣"]
)
def test_what_is_no_variant(variant: str) -> None:
    assert not is_variant(variant)
    assert split_key(f"{HEX}.{variant}") is None
    with pytest.raises(UsageError, match="not a variant"):
        MountableLayer(HEX, "/image", (), variant)


@pytest.mark.parametrize("text", ["", HEX[1:], HEX + "0", HEX.upper(), HEX + ".", "." + HEX, HEX + "\n", HEX + "/mnt"])
def test_what_is_no_key(text: str) -> None:
    assert not is_digest(text)
    assert not is_key(text)
    for call in (LayerMounts("/nowhere").detach, lambda key, user: LayerMounts("/nowhere").remount(key, "/image", ())):
        with pytest.raises(UsageError, match="not a layer"):
            call(text, "user")


@given(st.text(st.sampled_from("0a.-/\n\0A")))
def test_a_key_is_always_one_file_name(text: str) -> None:
    key = join_key(HEX, text)
    if is_key(key):
        assert "/" not in key
        assert ".." not in key
        assert key.isascii() and key.isprintable()
        assert split_key(key) == (HEX, text)


@pytest.mark.parametrize("plain", ["", "direct", "fuse1760000000000"])
@pytest.mark.parametrize("word", ["rec-0123456789ab", "via-0123456789ab"])
def test_a_recorded_mount_is_told_by_its_last_word_and_is_over_what_the_plain_one_is_over(
    plain: str, word: str
) -> None:
    variant = recorded_variant(plain, word)
    key = MountableLayer(HEX, "/image", (), variant).key
    assert is_key(key) and is_recorded(key)
    assert plain_variant(variant) == plain
    assert plain_key(key) == join_key(HEX, plain)
    assert recorder_in_path(key) is word.startswith("via")
    assert plain_key(plain_key(key)) == plain_key(key)


@pytest.mark.parametrize(
    "variant",
    [
        "",
        "direct",
        "fuse1",
        "rec",
        "rec-1",
        "rec-0123456789abc",
        "xrec-0123456789ab",
        "rec-0123456789ab.fuse1",
        "rec-0123456789aB",
    ],
)
def test_what_is_not_recorded_is_plain(variant: str) -> None:
    assert plain_variant(variant) == variant
    if is_variant(variant):
        key = join_key(HEX, variant)
        assert not is_recorded(key) and not recorder_in_path(key) and plain_key(key) == key
