"""Image configs (image-spec 1.1, config.md): what a container of the image runs, and what its layers unpack to.

A config is carried through a conversion as it came: fields that nobody here knows are kept, and only the root file
system, its history and the required OS features change. Numbers and strings keep their values, not their spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import MalformedError, UnsupportedError
from layerstore.oci.document import CONFIG_BYTES, dump, kind_of, parse, shown
from layerstore.oci.platform import Platform


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How a container of the image is started; None where the image doesn't say."""

    env: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    user: str = ""
    working_dir: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    volumes: tuple[str, ...] = ()
    exposed_ports: tuple[str, ...] = ()
    stop_signal: str = ""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """A view of the whole document; ``raw`` are the bytes that its digest names."""

    document: Mapping[str, object]
    raw: bytes
    platform: Platform
    diff_ids: tuple[Digest, ...]
    run: RunConfig

    @classmethod
    def parse(cls, data: bytes, what: str, *, warn: Callable[[str], None] | None = None) -> ImageConfig:
        """Parse a config; ``warn`` hears of duplicate keys.

        Raises:
            LimitError: larger than 16 MiB.
            MalformedError: not JSON, or a field that is used here has the wrong type.
            UnsupportedError: a root file system that isn't made of layers, or an unknown digest algorithm.
        """

        def duplicate(name: str) -> None:
            if warn is not None:
                warn(f"{what} has the key {name} twice; the last one counts")

        document = parse(data, what, limit=CONFIG_BYTES, duplicate=duplicate)
        return cls(
            document=document,
            raw=data,
            platform=Platform.from_json(document, what),
            diff_ids=_diff_ids(document, what),
            run=_run_config(document.get("config"), f"{what}: config"),
        )

    def check_layers(self, count: int, what: str, warn: Callable[[str], None]) -> None:
        """Compare with the manifest's number of layers: diff IDs pair with them by position.

        Raises:
            MalformedError: more or fewer diff IDs. History is only informative: a wrong count there is a warning.
        """
        if len(self.diff_ids) != count:
            raise MalformedError(
                f"{what}: the manifest has {count} layers and the config {len(self.diff_ids)} diff IDs; "
                "they have to pair one to one"
            )
        history = self.document.get("history")
        if not isinstance(history, list) or not history:
            return
        filled = sum(1 for step in history if not (isinstance(step, dict) and step.get("empty_layer") is True))
        if filled != count:
            warn(f"{what}: the history tells of {filled} layers and the manifest has {count}; history is ignored")

    def with_rootfs(
        self,
        diff_ids: Sequence[Digest],
        history: Sequence[Mapping[str, object]] | None,
        os_features: Iterable[str] = (),
    ) -> bytes:
        """The config of the converted image: same document, other layers.

        Args:
            diff_ids: of the new layers.
            history: replaces the old one; None takes it out, for old steps don't tell of the new layers.
            os_features: added to those that are already required.
        """
        document = dict(self.document)
        rootfs = document.get("rootfs")
        document["rootfs"] = {
            **(rootfs if isinstance(rootfs, dict) else {}),
            "type": "layers",
            "diff_ids": [str(diff_id) for diff_id in diff_ids],
        }
        if history is not None:
            document["history"] = [dict(step) for step in history]
        else:
            document.pop("history", None)
        present = document.get("os.features")
        features: list[object] = list(present) if isinstance(present, list) else []
        features.extend(feature for feature in os_features if feature not in features)
        if features:
            document["os.features"] = features
        return dump(document)


def _diff_ids(document: Mapping[str, object], what: str) -> tuple[Digest, ...]:
    rootfs = document.get("rootfs")
    if rootfs is None:
        return ()
    if not isinstance(rootfs, dict):
        raise MalformedError(f"{what}: rootfs is {kind_of(rootfs)} where an object belongs")
    if rootfs.get("type", "layers") != "layers":
        raise UnsupportedError(f"{what}: rootfs is of type {shown(str(rootfs['type']))}, not 'layers'")
    values = rootfs.get("diff_ids")
    if values is None:
        return ()
    if not isinstance(values, list):
        raise MalformedError(f"{what}: rootfs.diff_ids is {kind_of(values)} where an array belongs")
    digests = []
    for number, value in enumerate(values):
        place = f"{what}: rootfs.diff_ids[{number}]"
        try:
            digests.append(Digest.parse(value))
        except MalformedError as error:
            text = shown(value) if isinstance(value, str) else kind_of(value)
            raise MalformedError(f"{place} is not a digest: {text}") from error
        except UnsupportedError as error:
            raise UnsupportedError(f"{place}: {error}") from error
    return tuple(digests)


def _run_config(value: object, what: str) -> RunConfig:
    if value is None:
        return RunConfig()
    if not isinstance(value, dict):
        raise MalformedError(f"{what} is {kind_of(value)} where an object belongs")
    labels = _mapping(value, "Labels", what)
    for name, text in labels.items():
        if not isinstance(text, str):
            raise MalformedError(f"{what}.Labels[{shown(name)}] is {kind_of(text)} where a string belongs")
    return RunConfig(
        env=_texts(value, "Env", what) or (),
        entrypoint=_texts(value, "Entrypoint", what),
        cmd=_texts(value, "Cmd", what),
        user=_text(value, "User", what),
        working_dir=_text(value, "WorkingDir", what),
        labels=tuple((name, str(text)) for name, text in labels.items()),
        volumes=tuple(_mapping(value, "Volumes", what)),
        exposed_ports=tuple(_mapping(value, "ExposedPorts", what)),
        stop_signal=_text(value, "StopSignal", what),
    )


def _text(document: Mapping[str, object], name: str, what: str) -> str:
    value = document.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MalformedError(f"{what}.{name} is {kind_of(value)} where a string belongs")
    return value


def _texts(document: Mapping[str, object], name: str, what: str) -> tuple[str, ...] | None:
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, str) and name != "Env":
        return (value,)  # Docker 1.x wrote one-word commands like this
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MalformedError(f"{what}.{name} is not an array of strings")
    return tuple(value)


def _mapping(document: Mapping[str, object], name: str, what: str) -> Mapping[str, object]:
    value = document.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedError(f"{what}.{name} is {kind_of(value)} where an object belongs")
    return value
