"""Profiles: what a simulated node looks like, as data files.

A profile is YAML (or JSON). The shipped ones lie in ``profiles/`` and are
examples to write one's own after:

    model: NVIDIA L40S            # of every GPU; may be overridden per GPU
    memoryMiB: 46068
    driver: "550.54.15"           # optional, like library and cuda
    cuda: "12.4"
    numaNodes:                    # node -> its CPUs; "" is a node without CPUs
      0: 0-31
      1: 32-63
    gpus:                         # in the driver's order
      - {pci: "0000:16:00.0", numa: 0}
      - {pci: "0000:98:00.0", numa: 1}       # also: uuid, minor, mig, model, memoryMiB
    pcie:                         # as `nvidia-smi topo -m` names the levels
      - X    SYS
      - SYS  X
    nvlinks:                      # optional: number of NVLinks between two GPUs
      - 0 0
      - 0 0

``numa: null`` is a GPU whose NUMA node is not told; ``-`` in ``pcie`` a level
that is not known. Every mistake is reported at once.
"""

from __future__ import annotations

import importlib.resources
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deviceplugin.config.file import read_yaml
from deviceplugin.errors import ProfileError
from deviceplugin.model import DriverGpu, DriverInfo, GpuId, Link, PcieLevel

MAX_GPUS = 64
SUFFIX = ".yaml"

_BUS_ID = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]"
_CPUS = r"(\d+(-\d+)?(,\d+(-\d+)?)*)?"


class _GpuText(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pci: str
    numa: int | None
    uuid: str | None = None
    minor: int | None = None
    mig: bool | None = None
    model: str | None = None
    memory_mi_b: int | None = msgspec.field(name="memoryMiB", default=None)


class _ProfileText(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    model: str
    memory_mi_b: int = msgspec.field(name="memoryMiB")
    numa_nodes: dict[int, str]
    gpus: list[_GpuText]
    pcie: list[str]
    nvlinks: list[str] | None = None
    driver: str | None = None
    library: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A simulated node.

    Attributes:
        gpus: in the driver's order, all well.
        numa: per GPU, its NUMA node as sysfs would tell it; None: not told.
        cpus: per NUMA node, the list of its CPUs; "" for none.
    """

    name: str
    driver: DriverInfo
    gpus: tuple[DriverGpu, ...]
    numa: tuple[int | None, ...]
    cpus: dict[int, str]
    links: tuple[Link, ...]


def shipped() -> list[str]:
    """Names of the shipped profiles."""
    folder = importlib.resources.files("deviceplugin.sim") / "profiles"
    return sorted(
        entry.name.removesuffix(SUFFIX) for entry in folder.iterdir() if entry.name.endswith(SUFFIX)
    )


def load(name_or_path: str) -> Profile:
    """Read a profile.

    Args:
        name_or_path: a shipped profile's name, or a path: with a "/" or ending
            in .yaml, .yml or .json.

    Raises:
        ProfileError: with every mistake.
    """
    is_path = "/" in name_or_path or name_or_path.endswith((SUFFIX, ".yml", ".json"))
    if not is_path and name_or_path not in shipped():
        known = ", ".join(shipped())
        hint = "for a file of your own give a path, as in ./my.yaml"
        raise ProfileError([f"there is no profile {name_or_path!r}: shipped are {known}; {hint}"])
    try:
        if is_path:
            text = Path(name_or_path).read_text(encoding="utf-8")
        else:
            folder = importlib.resources.files("deviceplugin.sim") / "profiles"
            text = (folder / (name_or_path + SUFFIX)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError([f"{name_or_path}: cannot be read: {error}"]) from error
    return parse(name_or_path, text)


def parse(name: str, text: str) -> Profile:
    """A profile from its text.

    Raises:
        ProfileError: with every mistake.
    """
    try:
        content, twice = read_yaml(text)
    except ValueError as error:
        raise ProfileError([f"{name}: is no YAML: {error}"]) from error
    try:
        checked = msgspec.convert(content, _ProfileText)
    except msgspec.ValidationError as error:
        mistakes = list(_explain(content)) or [str(error)]
        raise ProfileError(f"{name}: {mistake}" for mistake in mistakes) from error
    mistakes = [*twice, *_check(checked)]
    if mistakes:
        raise ProfileError(f"{name}: {mistake}" for mistake in mistakes)
    return _build(name, checked)


def _explain(content: object) -> Iterator[str]:
    """Every way in which the content breaks the format; msgspec stops at the first."""
    import jsonschema  # needed only when something is wrong

    if not isinstance(content, dict):
        yield "must hold keys and values, starting with 'model: …'"
        return
    schema = msgspec.json.schema(_ProfileText)
    # JSON has string keys only; YAML's numbers as keys are what is meant here.
    as_json = _string_keys(content)
    for error in jsonschema.Draft202012Validator(schema).iter_errors(as_json):
        path = ".".join(str(part) for part in error.absolute_path)
        yield f"{path}: {error.message}" if path else error.message


def _string_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _string_keys(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_string_keys(inner) for inner in value]
    return value


def _check(text: _ProfileText) -> Iterator[str]:
    count = len(text.gpus)
    if not 1 <= count <= MAX_GPUS:
        yield f"gpus: {count} GPUs; from 1 to {MAX_GPUS} are possible"
    if text.memory_mi_b < 1:
        yield f"memoryMiB: {text.memory_mi_b} is not positive"
    for node, cpus in text.numa_nodes.items():
        if node < 0:
            yield f"numaNodes.{node}: a node's number is not negative"
        if not re.fullmatch(_CPUS, cpus):
            yield f"numaNodes.{node}: {cpus!r} is no list of CPUs, as in '0-15,32-47'"
    for kind in ("pci", "uuid", "minor"):
        values = [getattr(gpu, kind) for gpu in text.gpus if getattr(gpu, kind) is not None]
        for value in sorted({value for value in values if values.count(value) > 1}):
            yield f"gpus: {kind} {value} is used more than once"
    for index, gpu in enumerate(text.gpus):
        if not re.fullmatch(_BUS_ID, gpu.pci):
            yield f"gpus.{index}.pci: {gpu.pci!r} is no bus id as in sysfs, '0000:1b:00.0'"
        if gpu.numa is not None and gpu.numa not in text.numa_nodes:
            yield f"gpus.{index}.numa: there is no node {gpu.numa} in numaNodes"
        if gpu.uuid is not None and not re.fullmatch(r"[\x21-\x7e]{1,63}", gpu.uuid):
            yield f"gpus.{index}.uuid: {gpu.uuid!r} must be 1 to 63 printable characters"
        if gpu.minor is not None and gpu.minor < 0:
            yield f"gpus.{index}.minor: {gpu.minor} is negative"
        if gpu.memory_mi_b is not None and gpu.memory_mi_b < 1:
            yield f"gpus.{index}.memoryMiB: {gpu.memory_mi_b} is not positive"
    yield from _check_matrix("pcie", text.pcie, count, ("X", "-", *_LEVELS))
    if text.nvlinks is not None:
        yield from _check_matrix("nvlinks", text.nvlinks, count, None)


_LEVELS = {level.name: level for level in PcieLevel if level is not PcieLevel.UNKNOWN}


def _check_matrix(
    key: str, lines: list[str], count: int, words: tuple[str, ...] | None
) -> Iterator[str]:
    matrix = [line.split() for line in lines]
    if len(matrix) != count or any(len(row) != count for row in matrix):
        yield f"{key}: must have a row and a column for each of the {count} GPUs"
        return
    for a, row in enumerate(matrix):
        for b, cell in enumerate(row):
            if words is None and not re.fullmatch(r"[0-9]{1,3}", cell):
                yield f"{key}.{a}: {cell!r} is no number of links"
            elif words is not None and cell not in words:
                yield f"{key}.{a}: {cell!r} is none of {' '.join(words)}"
            elif words is not None and (cell == "X") != (a == b):
                yield f"{key}.{a}: X belongs on the diagonal, and nothing else does"
            elif a < b and cell != matrix[b][a]:
                yield f"{key}: GPUs {a} and {b}: {cell} one way and {matrix[b][a]} the other"


def _build(name: str, text: _ProfileText) -> Profile:
    namespace = uuid.uuid5(uuid.NAMESPACE_URL, "deviceplugin-simulated-gpu")
    gpus = tuple(
        DriverGpu(
            id=GpuId(gpu.uuid or f"GPU-{uuid.uuid5(namespace, f'{name}/{index}')}"),
            index=index,
            minor=index if gpu.minor is None else gpu.minor,
            model=gpu.model or text.model,
            pci_bus_id=gpu.pci,
            memory_bytes=(gpu.memory_mi_b or text.memory_mi_b) << 20,
            mig_enabled=gpu.mig,
            events=True,
        )
        for index, gpu in enumerate(text.gpus)
    )
    pcie = [line.split() for line in text.pcie]
    nvlinks = [line.split() for line in text.nvlinks or ()]
    links = tuple(
        Link(
            gpus[a].id,
            gpus[b].id,
            _LEVELS.get(pcie[a][b], PcieLevel.UNKNOWN),
            int(nvlinks[a][b]) if nvlinks else 0,
        )
        for a in range(len(gpus))
        for b in range(a + 1, len(gpus))
    )
    return Profile(
        name=name,
        driver=DriverInfo(text.driver, text.library, text.cuda),
        gpus=gpus,
        numa=tuple(gpu.numa for gpu in text.gpus),
        cpus=dict(text.numa_nodes),
        links=links,
    )
