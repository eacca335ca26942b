from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import UsageError
from overlay.layerkey import is_digest, is_key, is_variant, join_key, split_key
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
