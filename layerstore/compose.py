"""Stacks: layers of several images put on top of each other, and what their configs become together.

The order is base, workspace, toolkits in the order given; the last one wins where several provide a path. The rule for
configs is :func:`merge_configs`; ``docs/cli.md`` repeats it for users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import ConflictError, UsageError, printable
from layerstore.image import Image, Layer, Role, load_image, read_document
from layerstore.oci.config import ImageConfig
from layerstore.oci.document import dump
from layerstore.opened import open_layer
from layerstore.publish import Publisher, current
from layerstore.store.protocol import Store, WriteStore
from layerstore.tree.union import Conflict, conflicts, listed_whiteouts

NEUTRAL = "unknown"
"""Architecture of a layer that fits every machine."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A composed image before it is published: a value to print, compare, or publish.

    Attributes:
        names: what each layer was asked for as, bottom first.
        image: the layers; its config is not published yet.
        config: the merged config.
        conflicts: every path that several layers provide, and which of them wins (positions in ``names``).
    """

    names: tuple[str, ...]
    image: Image
    config: ImageConfig
    conflicts: tuple[Conflict, ...]


def plan_stack(
    store: Store, *, base: str, workspace: str | None = None, toolkits: Sequence[str] = (), force: bool = False
) -> Stack:
    """Put the layers in order and find out how they fit together; changes nothing.

    ``force`` puts a workspace or toolkit over another base than the one it was made over.

    Raises:
        NotFoundError: one of the names.
        ConflictError: made over another base, or for another platform, or whiteouts that no lower directory takes up.
        UsageError: an image of another role than asked for, or a layer twice.
    """
    wanted = [(base, Role.BASE), *([(workspace, Role.WORKSPACE)] if workspace else [])]
    wanted += [(name, Role.TOOLKIT) for name in toolkits]
    images = [_single(store, name, role) for name, role in wanted]
    layers = tuple(image.layers[0] for image in images)
    seen: dict[Digest, str] = {}
    for (name, _), layer in zip(wanted, layers, strict=True):
        if layer.metadata in seen:
            raise UsageError(f"{name!r} is the same layer as {seen[layer.metadata]!r}; a stack has each once")
        seen[layer.metadata] = name
        if not (force or _stands_on(layer, layers[0])):
            raise ConflictError(
                f"{name!r} was made over base layer {layer.base}, not over {base!r} ({layers[0].metadata}); "
                "convert it over that base, or --force"
            )
    names = tuple(name for name, _ in wanted)
    configs = [
        ImageConfig.parse(read_document(store, image.config, f"config of {name!r}"), f"config of {name!r}")
        for name, image in zip(names, images, strict=True)
    ]
    with ExitStack() as stack:
        trees = [stack.enter_context(open_layer(store, layer)).tree() for layer in layers]
        for path, number in listed_whiteouts(trees):
            raise ConflictError(
                f"{names[number]!r} deletes /{printable(path)} from a directory that no layer below has, so the mark "
                "itself would be seen; convert it over this base with --base and --rebase"
            )
        found = tuple(conflicts(trees))
    roles = [role for _, role in wanted]
    return Stack(names, Image(layers, images[0].config), merge_configs(configs, roles, names), found)


def _stands_on(layer: Layer, base: Layer) -> bool:
    """Whether what ``layer`` hides and copies up is right over ``base``.

    A base converted twice may refer to other packs and so be another layer; the same source layers are the same tree.
    """
    if layer.base in (None, base.metadata):
        return True
    return bool(base.diff_ids) and layer.diff_ids[: len(base.diff_ids)] == base.diff_ids


def _single(store: Store, name: str, role: Role) -> Image:
    image = load_image(store, name)
    if len(image.layers) != 1:
        raise UsageError(f"{name!r} is a stack already; compose takes single layers")
    if image.layers[0].role is not role:
        raise UsageError(f"{name!r} is a {image.layers[0].role}, not a {role}")
    return image


def publish_stack(store: WriteStore, stack: Stack, *, tag: str | None) -> Image:
    """Publish a composed stack; returns it as published."""
    before = None if tag is None else current(store, tag)
    with store.lease() as lease:
        diff_ids = [digest for layer in stack.image.layers for digest in layer.raw_digests]
        publisher = Publisher(store, lease)
        config = publisher.config(stack.config, diff_ids)
        image = Image(stack.image.layers, config)
        publisher.image(image, tag=tag, expected=before)
    return image


def merge_configs(configs: Sequence[ImageConfig], roles: Sequence[Role], names: Sequence[str]) -> ImageConfig:
    """One config for a stack.

    * User, WorkingDir, Entrypoint, Cmd, StopSignal, Healthcheck, Shell and unknown keys: the workspace's where it says
      something, else the base's. An Entrypoint from the workspace takes the base's Cmd away, as a Dockerfile does.
      Toolkits don't change what is run.
    * Env: all variables, in order of first appearance; a later layer's value wins. PATH is joined: the entries of later
      layers first, each once.
    * Labels, Volumes, ExposedPorts: all; a later layer's value wins.
    * Platform: has to be one; a layer that says none, or "unknown", fits every machine.

    Raises:
        ConflictError: layers for different platforms.
    """
    document: dict[str, object] = {}
    run: dict[str, object] = {}
    env: dict[str, str] = {}
    platform_of: tuple[str, str, str] | None = None
    chosen_by = ""
    for config, role, name in zip(configs, roles, names, strict=True):
        theirs = config.document.get("config")
        section: Mapping[str, object] = theirs if isinstance(theirs, dict) else {}
        _merge_env(env, config.run.env)
        for key in ("Labels", "Volumes", "ExposedPorts"):
            value = section.get(key)
            if isinstance(value, dict) and value:
                before = run.get(key)
                run[key] = {**(before if isinstance(before, dict) else {}), **value}
        if role is not Role.TOOLKIT:
            document.update({key: value for key, value in config.document.items() if key not in _NOT_INHERITED})
            if section.get("Entrypoint"):
                run.pop("Cmd", None)
            run.update({k: v for k, v in section.items() if k not in _MERGED and v not in (None, "", [], {})})
        platform = (config.platform.os or "linux", config.platform.architecture, config.platform.variant)
        if platform[1] in (NEUTRAL, ""):
            continue
        if platform_of is None:
            platform_of, chosen_by = platform, name
        elif platform[:2] != platform_of[:2] or (platform[2] and platform_of[2] and platform[2] != platform_of[2]):
            raise ConflictError(
                f"{name!r} is for {'/'.join(filter(None, platform))}, {chosen_by!r} for "
                f"{'/'.join(filter(None, platform_of))}: a stack has one platform"
            )
    os, architecture, variant = platform_of or ("linux", NEUTRAL, "")
    document |= {"os": os, "architecture": architecture}
    if variant:
        document["variant"] = variant
    if env:
        run["Env"] = [f"{key}={value}" for key, value in env.items()]
    document["config"] = run
    document["rootfs"] = {"type": "layers", "diff_ids": []}
    return ImageConfig.parse(dump(document), "merged config")


_MERGED = frozenset({"Env", "Labels", "Volumes", "ExposedPorts"})
_NOT_INHERITED = frozenset({"config", "rootfs", "history", "architecture", "os", "variant"})


def _merge_env(env: dict[str, str], theirs: Sequence[str]) -> None:
    for item in theirs:
        key, _, value = item.partition("=")
        if key == "PATH" and key in env:
            # An empty entry would mean the working directory: it is kept where it is meant, but none is made up.
            value = ":".join(dict.fromkeys(":".join(filter(None, (value, env[key]))).split(":")))
        env[key] = value
