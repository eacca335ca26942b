"""Sandboxes by description, and the requests that come of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from layerstore.errors import ImgtoolError, LimitError, MalformedError, UnsupportedError, UsageError
from overlay.layers import USER
from overlay.service import yaml_document
from overlay.service.description import SCHEMA, parse
from overlay.service.duration import parse_duration
from overlay.service.options import NodeOptions
from overlay.service.request import ID, Record, SandboxRequest
from overlay.service.yaml_document import DEPTH, MAX_SIZE, load

WHOLE = b"""\
apiVersion: imgtool/v1
kind: Sandbox
name: box
isolation: container
image:
  base: debian
  workspace: "sha256:%(hex)s"
  toolkit: [tools, more]
mode: lazy
backend: fuse
store: /srv/store
count: 2
resources:
  scratch_gib: 0.5
  cpu: 4
  memory: 8Gi
lifecycle:
  ttl: 1h30m
  on_stop: remove
receipts: /var/receipts
prefetch: {plan: tests, wait: true, record: monday}
network: {mode: none, allow: [pypi]}
env: {A: "1"}
""" % {b"hex": b"a" * 64}


def test_everything_that_is_ours_becomes_the_request_and_the_rest_is_carried() -> None:
    description = parse(WHOLE, "sandbox.yaml")
    assert description.request("/default") == SandboxRequest(
        base="debian",
        workspace="sha256:" + "a" * 64,
        toolkits=("tools", "more"),
        store="/srv/store",
        id="box",
        mode="lazy",
        backend="fuse",
        scratch=1 << 29,
        count=2,
        ttl=5400.0,
        isolation="container",
        receipts="/var/receipts",
        plan="tests",
        wait_prefetch=True,
        record=Record("monday"),
        carried={
            "network": {"mode": "none", "allow": ["pypi"]},
            "env": {"A": "1"},
            "resources": {"cpu": 4, "memory": "8Gi"},
        },
    )
    assert description.not_ours == ("network", "env", "resources.cpu", "resources.memory")
    as_json = json.dumps(yaml.safe_load(WHOLE)).encode()
    assert parse(as_json, "x").request("/d") == description.request("/d")


def test_little_is_needed_and_options_count_more() -> None:
    description = parse(b"image: repo-env\n", "f")
    assert description.request("/store") == SandboxRequest(base="repo-env", store="/store")
    assert description.not_ours == ()
    overridden = parse(WHOLE, "f").request("/d", {"store": "/other", "count": 1, "ttl": None, "mode": "auto"})
    assert (overridden.store, overridden.count, overridden.ttl, overridden.mode) == ("/other", 1, None, "auto")
    one = parse(b"image: {base: a, toolkit: b}\nlifecycle: {ttl_s: 2.5}\nresources: {read_only: true}", "f")
    request = one.request("/s")
    assert (request.toolkits, request.ttl, request.read_only) == (("b",), 2.5, True)
    with pytest.raises(UsageError, match=r"^f: a read-only sandbox takes no writes"):
        one.request("/s", {"scratch": 4096})


LIKE_SCRATCH = "looks like 'scratch_gib' misspelt"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f is null where a mapping with `image` in it belongs"),
        ("- image: a", "f is an array where a mapping with `image` in it belongs"),
        ("a: b", "f: the description lacks the field 'image'"),
        (
            "spec: {image: a}",
            "f: the description lacks the field 'image'; its fields stand at the top, not under `spec`",
        ),
        ("image: 12", "f: image is an integer where a string or a mapping belongs"),
        ("image: ''", "f: image is empty"),
        ("image: {}", "f: image lacks the field 'base'"),
        ("image: {base: 12.10}", "f: image.base is a fraction where a string belongs; quote it"),
        ("image: {base: a, worksapce: b}", "f: image has no field 'worksapce'; did you mean 'workspace'?"),
        ("image: {base: a, toolkits: b}", "f: image has no field 'toolkits'; did you mean 'toolkit'?"),
        ("image: {base: a, x: b}", "f: image has no field 'x'; there are base, workspace, toolkit, force"),
        ("image: {base: a, toolkit: [b, 3]}", "f: image.toolkit[1] is an integer where a string belongs; quote it"),
        ("image: a\nmode: fast", "f: mode is 'fast'; it can be auto, eager, lazy, direct"),
        ("image: a\nbackend: ublk", "f: backend is 'ublk'; it can be fanotify, fuse"),
        ("image: a\nisolation: vm", "f: isolation is 'vm'; it can be container, none, microvm"),
        ("image: a\nkind: Pod", "f: kind is 'Pod'; it can be Sandbox"),
        (
            "image: a\napiVersion: x/v2",
            "f: apiVersion is 'x/v2', which is not version v1, the one that this release reads",
        ),
        ("image: a\nstore: store", "f: store is 'store', which has to be an absolute path or a URL"),
        ("image: a\nreceipts: {}", "f: receipts is an object where a string belongs"),
        (
            "image: a\nid: Box",
            "f: id is 'Box', which is no id: 1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit",
        ),
        ("image: a\nid: x\nname: x", "f: id and name are two words for one field; give one of them"),
        ("image: a\ncount: 0", "f: count is 0; it can be 1 or more"),
        ("image: a\ncount: true", "f: count is a boolean where an integer belongs"),
        ("image: a\ncount: 10001", "f: count is 10001; it can be up to 10000"),
        ("image: a\nresources:", "f: resources is null where a mapping belongs"),
        ("image: a\nresources: {scratch_gib: 0}", "f: resources.scratch_gib is 0; it has to be above 0"),
        ("image: a\nresources: {scratch_gib: 1Gi}", "f: resources.scratch_gib is a string where a number belongs"),
        ("image: a\nresources: {scratch_gb: 1}", f"f: the field 'resources.scratch_gb' {LIKE_SCRATCH}"),
        ("image: a\nresources: {scratch: 1}", f"f: the field 'resources.scratch' {LIKE_SCRATCH}"),
        ("image: a\nresources: {readonly: 1}", "f: the field 'resources.readonly' looks like 'read_only' misspelt"),
        ("image: a\nlifecyle: {ttl: 1h}", "f: the field 'lifecyle' looks like 'lifecycle' misspelt"),
        ("images: a", "f: the field 'images' looks like 'image' misspelt"),
        ("image: a\nreceipt: /a", "f: the field 'receipt' looks like 'receipts' misspelt"),
        ("image: a\nlifecycle: {idle: 1h}", "f: lifecycle has no field 'idle'; there are ttl, ttl_s, on_stop"),
        ("image: a\nlifecycle: {on_stop: keep}", "f: lifecycle.on_stop is 'keep'; it can be remove"),
        ("image: a\nlifecycle: {ttl: 3600}", "f: lifecycle.ttl is an integer where a string belongs; quote it"),
        (
            "image: a\nlifecycle: {ttl: soon}",
            "f: lifecycle.ttl: 'soon' is not a span of time; write it as 90s, 30m, 1h30m or 2d",
        ),
        ("image: a\nprefetch: tests", "f: prefetch is a string where a mapping belongs"),
        ("image: a\nprefetch: {plans: x}", "f: prefetch has no field 'plans'; did you mean 'plan'?"),
        (
            "image: a\nprefetch: {plan: ../x}",
            "f: prefetch.plan is '../x', which is no name of a file: letters, digits and . _ - :, "
            "first a letter or digit",
        ),
        ("image: a\nprefetch: {record: 3}", "f: prefetch.record is an integer where true or false or a string belongs"),
        ("image: a\nprefech: {}", "f: the field 'prefech' looks like 'prefetch' misspelt"),
        (
            "image: a\nlifecycle: {ttl: 1h, ttl_s: 3}",
            "f: lifecycle: ttl and ttl_s are two words for one field; give one of them",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text.encode(), "f")
    assert str(caught.value) == message


def test_words_of_other_parts_are_not_taken_for_ours() -> None:
    words = ("model", "node", "storage", "account", "names", "modes", "network", "labels", "restore", "metadata", "env")
    text = "image: a\n" + "".join(f"{word}: 1\n" for word in words)
    assert parse(text.encode(), "f").not_ours == words


def test_a_guest_is_not_in_this_release() -> None:
    with pytest.raises(UnsupportedError, match=r"^f: isolation microvm needs a disk for its guest"):
        parse(b"image: a\nisolation: microvm", "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"image: a\nimage: b", "f, line 2: the key 'image' a second time"),
        (b'{"image": "a", "image": "b"}', "f, line 1: the key 'image' a second time"),
        (b"image: a\n---\nimage: b", "f, line 2: a second document; one file has one"),
        (b"image: &a [*a]", "f, line 1: the alias 'a' stands for nothing that is complete"),
        (b"image: *b", "f, line 1: the alias 'b' stands for nothing that is complete"),
        (b"a: &a {x: 1}\nb:\n  <<: *a", "f, line 3: a merge key (<<); write the fields out"),
        (
            b"image: !!python/object:os.system a",
            "f, line 1: the tag 'tag:yaml.org,2002:python/object:os.system'; values are plain",
        ),
        (b"image: !x {}", "f, line 1: the tag '!x'; values are plain"),
        (b"image: !!int '3'", "f, line 1: the tag 'tag:yaml.org,2002:int'; values are plain"),
        (b"a: .inf", "f, line 1: the number '.inf', which JSON can't have"),
        (b"a: 1e999", "f, line 1: the number '1e999', which JSON can't have"),
        (b"a: " + b"9" * 500, "f, line 1: an integer of 500 digits"),
        (b"1: a", "f, line 1: a key that is not a string; quote it"),
        (b"? [a]\n: b", "f, line 1: a key that is not a string; quote it"),
        (b"\xff", "f is not UTF-8 (at byte 0)"),
        (b"[" * (DEPTH + 1), "f, line 1: nested more than 64 deep"),
    ],
)  # fmt: skip
def test_yaml_that_could_be_read_in_two_ways_or_is_too_much_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse(text, "f")
    assert str(caught.value) == message


@pytest.mark.parametrize("text", [b"a: [1", b"a: b: c", b"\t- a", b"a: \x01", b"a: 'x", b"%YAML 9.9\n---\na: 1", b"@a"])
def test_broken_yaml_is_refused_with_the_place(text: bytes) -> None:
    with pytest.raises(MalformedError, match=r"^f(, line 1|, line 2)?: not YAML: "):
        parse(text, "f")


def test_scalars_are_those_of_the_core_schema() -> None:
    text = (
        b"[yes, on, No, 010, 0x1F, 0o17, 1_000, 1.5, -2e3, .5, ~, null, '', \"\", true, FALSE, 2026-01-01, 1:30, '1']"
    )
    assert load(text, "f") == [
        "yes", "on", "No", 10, 31, 15, "1_000", 1.5, -2000.0, 0.5, None, None, "", "", True, False, "2026-01-01",
        "1:30", "1",
    ]  # fmt: skip
    assert load(b"a: &x [1]\nb: *x\nc: !!str 3", "f") == {"a": [1], "b": [1], "c": "3"}
    assert load(b"", "f") is None
    assert load(b"\xef\xbb\xbfa: 1", "f") == {"a": 1}
    assert parse(b'{"image": "a", "x": "\\ud83d\\ude00"}', "f").request("/s").carried == {"x": "😀"}


def test_aliases_are_bounded_by_what_they_come_to() -> None:
    laughs = b"a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        laughs += f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n".encode()
    with pytest.raises(LimitError, match="its aliases come to more than"):
        parse(laughs, "f")
    long = b"a: &a " + b"x" * 500_000 + b"\nb: [*a, *a, *a, *a, *a]\n"
    with pytest.raises(LimitError, match="its aliases come to more than"):
        parse(long, "f")
    with pytest.raises(LimitError, match=f"more than the limit of {MAX_SIZE} bytes"):
        parse(b" " * (MAX_SIZE + 1), "f")
    with pytest.raises(LimitError, match="limit"):
        parse(b"{" + b" " * MAX_SIZE, "f")


def test_what_is_carried_is_bounded() -> None:
    with pytest.raises(UsageError, match=r"carried has .* bytes"):
        parse(b"image: a\nblob: " + b"x" * 70_000, "f").request("/s")


KEYS = (
    "image", "base", "toolkit", "workspace", "mode", "lifecycle", "ttl", "ttl_s", "resources", "scratch_gib", "count",
    "id", "name", "store", "receipts", "isolation", "apiVersion", "kind", "read_only", "x", "", "prefetch", "plan",
    "wait", "record",
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["a", "/a", "1h", "v1", "Sandbox", "lazy", "", "x" * 600, "none"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)
VALIDATOR = jsonschema.Draft7Validator(json.loads(Path(SCHEMA).read_bytes()))


@given(DOCUMENTS)
def test_what_is_accepted_is_what_the_schema_accepts(document: dict[str, Any]) -> None:
    """Another validator agrees, but for what a schema can't say."""
    valid = VALIDATOR.is_valid(document)
    try:
        parse(json.dumps(document).encode(), "f")
    except UsageError as error:
        beyond = ("two words for one field", "not a span of time")
        assert not valid or any(words in str(error) for words in beyond), error
    except UnsupportedError:
        pass
    else:
        assert valid


@given(DOCUMENTS | st.fixed_dictionaries({"image": st.just("a"), "x": VALUES}))
def test_any_value_is_taken_or_refused_as_yaml_and_as_json_alike(document: dict[str, Any]) -> None:
    outcomes = []
    for text in (json.dumps(document), yaml.safe_dump(document, sort_keys=False, width=1 << 20)):
        try:
            outcomes.append(repr(parse(text.encode(), "f").request("/s")))
        except ImgtoolError as error:
            assert len(str(error).splitlines()) == 1
            outcomes.append(type(error).__name__)
    assert outcomes[0] == outcomes[1]


FRAGMENTS = st.sampled_from(
    ["image", ": ", "\n", "  ", "- ", "[", "]", "{", "}", ",", "&a ", "*a", "<<: ", "!!x ", "|\n", ">", "'", '"', "? ",
     "---\n", "...\n", "%TAG", "#", "\t", "\\x", "\x00", "é", "\u2028", "1", "~", "base"]
)  # fmt: skip


@pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
@given(data=st.binary(max_size=60) | st.lists(FRAGMENTS, max_size=20).map(lambda parts: "".join(parts).encode()))
def test_hostile_bytes_raise_only_our_errors(loader: object, data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_document, "_LOADER", loader)
        for text in (data, b"image: a\nx: " + data):
            try:
                parse(text, "f").request("/s")
            except ImgtoolError as error:
                assert len(str(error).splitlines()) == 1


def test_deep_nesting_is_no_recursion() -> None:
    for text in (b"[" * 500_000, b"{a: " * 200_000, b"- " * 400_000, b'{"a":' * 150_000):
        with pytest.raises(ImgtoolError):
            parse(text, "f")


# -- requests and options ---------------------------------------------------------------------------------------------


def test_a_request_round_trips_and_names_its_sandboxes() -> None:
    request = parse(WHOLE, "f").request("/s")
    assert SandboxRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert request.ids() == ("box-1", "box-2")
    assert request.traces() == ("monday-1", "monday-2")
    assert SandboxRequest(base="a", store="/s", record=Record("m")).traces() == ("m",)
    assert SandboxRequest(base="a", store="/s", record=Record(), count=2).traces() == (None, None)
    assert parse(b"image: a\nprefetch: {record: true}", "f").request("/s").record == Record()
    assert parse(b"image: a\nprefetch: {record: false}", "f").request("/s").record is None
    assert SandboxRequest(base="a", store="/s").ids() == (None,)
    assert SandboxRequest(base="a", store="/s", count=3).ids() == (None, None, None)
    assert SandboxRequest(base="a", store="/s", id="x").ids() == ("x",)
    assert ID.pattern == USER.pattern
    url = "https://host/store"
    assert parse(f"image: a\nstore: {url}".encode(), "f").request("/s").store == url


GRAMMAR = "it takes 1 to 63 of a-z, 0-9, '.', '_' and '-', and starts with a letter or digit"
SECONDS = "it can be above 0 and up to 316224000 seconds"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": None}, "sandbox request lacks the field 'base'"),
        ({"base": "a\0"}, "sandbox request: base is 'a\\x00', which holds a NUL or half of a surrogate pair"),
        ({"base": "a" * 513}, "sandbox request: base has 513 characters; it can have 1 to 512"),
        ({"store": "s"}, "sandbox request: store is 's'; it has to be an absolute path or a URL"),
        ({"receipts": "r"}, "sandbox request: receipts is 'r'; it has to be an absolute path"),
        ({"id": "../x"}, f"not a sandbox id: '../x'; {GRAMMAR}"),
        ({"id": "x" * 63, "count": 2}, f"not a sandbox id: '{'x' * 63}-1'; {GRAMMAR}"),
        ({"mode": "ublk"}, "sandbox request: mode is 'ublk'; it can be auto, eager, lazy, direct"),
        ({"mode": "eager", "backend": "fuse"}, "mode eager has no backend: fuse is one of mode lazy"),
        ({"scratch": 1.0}, "sandbox request: scratch is a fraction where an integer belongs"),
        ({"scratch": 0}, "sandbox request: scratch is 0; it can be 1 to 17592186044416"),
        ({"scratch": 1, "read_only": True}, "a read-only sandbox takes no writes, so there is no scratch to bound"),
        ({"count": 10_001}, "sandbox request: count is 10001; it can be 1 to 10000"),
        ({"count": 10**200}, "sandbox request: count is out of range; it can be 1 to 10000"),
        ({"ttl": float("nan")}, f"sandbox request: ttl is no finite number; {SECONDS}"),
        ({"ttl": 0}, f"sandbox request: ttl is 0; {SECONDS}"),
        ({"toolkits": "a"}, "sandbox request: toolkits is a string where an array of strings belongs"),
        ({"toolkits": ["a"] * 401}, "sandbox request: toolkits has 401 items, more than the 400 that are taken"),
        ({"carried": {"a": float("inf")}}, "sandbox request: carried holds something that isn't JSON"),
        ({"carried": {1: 2}}, "sandbox request: carried is an object where an object belongs"),
        ({"read_only": 1}, "sandbox request: read_only is an integer where true or false belongs"),
        ({"record": True}, "sandbox request: record is a boolean where an object belongs"),
        ({"record": {"nme": "x"}}, "sandbox request: record has no field 'nme'; did you mean 'name'?"),
        ({"record": {"name": "a/b"}}, "name of a trace: 'a/b' has a slash, and can't be a file's name"),
        (
            {"plan": "../x"},
            "name of a plan: '../x' has a slash, and can't be a file's name",
        ),
        ({"plan": "none", "wait_prefetch": True}, "without a plan nothing is fetched ahead that could be waited for"),
        ({"command": ["x" * 4097]}, "sandbox request: command[0] has 4097 characters; it can have 1 to 4096"),
        ({"tty": True}, "sandbox request has no field 'tty'; did you mean 'ttl'?"),
    ],
)  # fmt: skip
def test_a_request_is_checked_whole(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        SandboxRequest.from_json({"base": "a", "store": "/s", **fields})
    assert str(caught.value) == message


@given(st.dictionaries(st.sampled_from([*SandboxRequest.__dataclass_fields__, "x"]), VALUES, max_size=6))
def test_hostile_requests_raise_only_our_errors(document: dict[str, object]) -> None:
    for fields in (document, {"base": "a", "store": "/s", **document}):
        try:
            request = SandboxRequest.from_json(fields)
        except UsageError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert SandboxRequest.from_json(request.to_json()) == request


def test_no_document_but_an_object_is_a_request() -> None:
    for document in (None, [], "x", 3):
        with pytest.raises(UsageError, match="where an object belongs"):
            SandboxRequest.from_json(document)


def test_options_of_a_node_round_trip() -> None:
    options = NodeOptions(
        limit=1 << 30,
        prefetch_bandwidth=1 << 20,
        log="/var/log/x",
        log_format="text",
        idle_exit=300.0,
        listen_fds=(("group", 3),),
    )
    for each in (NodeOptions(), options):
        assert NodeOptions.from_json(json.loads(json.dumps(each.to_json()))) == each
    for document in (
        {"threads": 0},
        {"prefetch_bandwidth": 0},
        {"log_format": "xml"},
        {"listen_fds": [["a", True]]},
        {"listen_fds": [[1]]},
        {"a": 1},
    ):
        with pytest.raises(UsageError, match=r"^node options"):
            NodeOptions.from_json(document)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("2d", 172_800), ("1.5s", 1.5), ("1d1h1m1s", 90_061)],
)  # fmt: skip
def test_spans_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "1", "1w", "h", "1m1h", "-1s", "1e3s", "1h 30m", "٣s", "1" * 30 + "s"])
def test_what_is_no_span_of_time(text: str) -> None:
    with pytest.raises(UsageError, match="is not a span of time"):
        parse_duration(text)
