from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstore.errors import ImgtoolError, MalformedError, UnsupportedError
from overlay.format import MAX_SIZE, SandboxState, chain_of

STATE = SandboxState(
    id="box",
    created=1_700_000_000,
    boot="458c9d9f-608f-4e5e-836b-b5ea0267a7a4",
    mode="eager",
    read_only=False,
    scratch=None,
    layers=("ab" * 32, "cd" * 32),
    chain=chain_of(("ab" * 32, "cd" * 32)),
    image={"name": "debian"},
    receipt={"manifest": "sha256:00"},
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def document(**changes: object) -> bytes:
    return json.dumps({**json.loads(STATE.to_bytes()), **changes}).encode()


@pytest.mark.parametrize(
    "state",
    [
        STATE,
        replace(STATE, read_only=True),
        replace(STATE, scratch=1 << 30, image={}, receipt={"é\udcff": [1]}),
        replace(STATE, mounts=("ab" * 32 + ".direct", "cd" * 32)),
    ],
)
def test_what_is_written_reads_back(state: SandboxState) -> None:
    assert SandboxState.from_bytes(state.to_bytes()) == state


def test_fields_on_disk() -> None:
    assert list(json.loads(STATE.to_bytes())) == [
        "magic",
        "version",
        "features",
        "id",
        "created",
        "boot",
        "mode",
        "read_only",
        "scratch",
        "layers",
        "mounts",
        "chain",
        "image",
        "receipt",
    ]


def test_unknown_fields_are_passed_over() -> None:
    assert SandboxState.from_bytes(document(later="thing")) == STATE


def test_a_state_without_mounts_is_of_layers_mounted_from_local_files() -> None:
    fields = json.loads(STATE.to_bytes())
    del fields["mounts"]
    assert SandboxState.from_bytes(json.dumps(fields).encode()) == STATE
    assert STATE.mounts == STATE.layers


@pytest.mark.parametrize(
    "mounts",
    [
        ["ab" * 32],
        ["cd" * 32, "ab" * 32],
        ["ab" * 32, "cd" * 32, "cd" * 32],
        ["ab" * 32 + ".", "cd" * 32],
        ["ab" * 32 + "./x", "cd" * 32],
        ["ab" * 32 + "direct", "cd" * 32],
        ["ab" * 32, 1],
        "direct",
    ],
)
def test_mounts_of_other_layers_are_refused(mounts: object) -> None:
    with pytest.raises(MalformedError, match=r"state of a sandbox: .*mounts"):
        SandboxState.from_bytes(document(mounts=mounts))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"magic": "other"}, MalformedError),
        ({"version": 2}, UnsupportedError),
        ({"features": ["quota"]}, UnsupportedError),
        ({"features": "quota"}, MalformedError),
        ({"id": 1}, MalformedError),
        ({"created": 1.5}, MalformedError),
        ({"created": True}, MalformedError),
        ({"read_only": 0}, MalformedError),
        ({"scratch": "1G"}, MalformedError),
        ({"layers": [1]}, MalformedError),
        ({"image": []}, MalformedError),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], error: type[ImgtoolError]) -> None:
    with pytest.raises(error, match="state of a sandbox"):
        SandboxState.from_bytes(document(**changes))


def test_an_unknown_feature_is_named() -> None:
    with pytest.raises(UnsupportedError, match="quota"):
        SandboxState.from_bytes(document(features=["quota"]))


@pytest.mark.case("O06")
def test_layers_that_differ_from_the_chain_are_refused() -> None:
    with pytest.raises(MalformedError, match="chain"):
        SandboxState.from_bytes(document(layers=["ef" * 32]))


@pytest.mark.case("O06")
def test_the_chain_depends_on_order_and_members() -> None:
    chains = {chain_of(layers) for layers in ((), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",))}
    assert len(chains) == 6


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b" " * (MAX_SIZE + 1)])
def test_what_is_no_state_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedError):
        SandboxState.from_bytes(text)


@given(st.dictionaries(st.sampled_from(sorted(json.loads(STATE.to_bytes()))), json_values))
@settings(deadline=None, max_examples=100)
def test_hostile_fields_raise_only_our_errors(changes: dict[str, object]) -> None:
    try:
        state = SandboxState.from_bytes(document(**changes))
    except ImgtoolError:
        return
    assert state.chain == chain_of(state.layers)
