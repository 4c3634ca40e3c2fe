"""Profiles: what a simulated node looks like, as data files.

Owns the format, and what a person is told about a file that breaks it: every
mistake at once, each with its place. Never gives half a profile.

A profile is YAML (or JSON). The shipped ones lie in ``profiles/`` and are
examples to write one's own after:

    model: NVIDIA L40S            # of every GPU that names no other
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

``numa: null`` is a GPU whose NUMA node is not told, ``mig: null`` one without
MIG, ``-`` in ``pcie`` a level that is not known. Surprising: the two tables
are apart because ``nvidia-smi`` prints one word for two GPUs, and NVLinks hide
the PCIe level behind them, which counts too.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deviceplugin.config.file import read_yaml
from deviceplugin.errors import ProfileError
from deviceplugin.model import DriverGpu, DriverInfo, GpuId, Link, PcieLevel

MAX_GPUS = 64
SUFFIX = ".yaml"

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "deviceplugin-simulated-gpu")
_LEVELS = {"-": PcieLevel.UNKNOWN} | {
    level.name: level for level in PcieLevel if level is not PcieLevel.UNKNOWN
}
_NODES_MAX = 1024
"""What the kernel can be built for at most."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A simulated node.

    Attributes:
        name: a shipped profile's, or the file's without folder and suffix.
        gpus: in the driver's order, all well.
        numa: per GPU, its NUMA node as sysfs would tell it; None: not told.
        cpus: per NUMA node, the list of its CPUs; "" for none.
        links: one for each pair of GPUs.
    """

    name: str
    driver: DriverInfo
    gpus: tuple[DriverGpu, ...]
    numa: tuple[int | None, ...]
    cpus: Mapping[int, str]
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
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
        raise ProfileError([f"{name_or_path}: cannot be read: {error}"]) from error
    return parse(name_or_path, text)


def parse(name: str, text: str) -> Profile:
    """A profile from its text.

    Args:
        name: where the text is from; mistakes start with it.

    Raises:
        ProfileError: with every mistake.
    """
    short = Path(name).stem if "/" in name or "." in name else name
    try:
        content, mistakes = read_yaml(text)
    except ValueError as error:
        raise ProfileError([f"{name}: is neither YAML nor JSON: {error}"]) from error
    mistakes += _check(short, content)
    if mistakes:
        raise ProfileError(f"{name}: {mistake}" for mistake in mistakes)
    return _build(short, content)


# --- what the values of a key may be ------------------------------------------------

Complaint = Callable[[Any], str | None]
"""What is wrong with a value, to be read after its key; None when it is right."""


def _show(value: object) -> str:
    """A wrong value in a sentence. What a file can hold may be too much to print."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple | set):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _text(value: Any) -> str | None:
    good = isinstance(value, str) and value.strip() and value.isprintable()
    return None if good else f"{_show(value)} is not a line of text"


def _number(low: int, high: int) -> Complaint:
    def complaint(value: Any) -> str | None:
        # True is an int to Python, and to nobody who writes a profile.
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if good else f"{_show(value)} is not a whole number from {low} to {high}"

    return complaint


def _pattern(pattern: str, meaning: str) -> Complaint:
    def complaint(value: Any) -> str | None:
        good = isinstance(value, str) and re.fullmatch(pattern, value)
        return None if good else f"{_show(value)} is not {meaning}"

    return complaint


def _truth(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"{_show(value)} is neither true nor false"


def _kind(kind: type, meaning: str) -> Complaint:
    return lambda value: None if isinstance(value, kind) else f"{_show(value)} is not {meaning}"


def _or_null(complaint: Complaint) -> Complaint:
    return lambda value: None if value is None else complaint(value)


_MEMORY = _number(1, 2**24)
_CPUS = _pattern(
    r"([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?", "a list of CPUs in quotes, as in '0-15,32-47'"
)
_TABLE = _kind(list, "a list with a line for each GPU")
_LEVEL = _pattern("|".join(_LEVELS), "one of " + " ".join(_LEVELS))
_NVLINKS = _pattern("0|[1-9][0-9]?", "a number of NVLinks from 0 to 99")

_PROFILE_KEYS: Mapping[str, Complaint] = {
    "model": _text,
    "memoryMiB": _MEMORY,
    "numaNodes": _kind(dict, "a mapping of NUMA nodes to CPUs, as in {0: 0-31}"),
    "gpus": _kind(list, "a list of GPUs"),
    "pcie": _TABLE,
    "nvlinks": _or_null(_TABLE),
    "driver": _or_null(_text),
    "library": _or_null(_text),
    "cuda": _or_null(_text),
}
_PROFILE_REQUIRED = ("model", "memoryMiB", "numaNodes", "gpus", "pcie")

_GPU_KEYS: Mapping[str, Complaint] = {
    "pci": _pattern(
        r"([0-9a-f]{4}|[1-9a-f][0-9a-f]{4,7}):[0-9a-f]{2}:[01][0-9a-f]\.[0-7]",
        "a bus id as sysfs writes it, '0000:1b:00.0'",
    ),
    "numa": _or_null(_number(0, _NODES_MAX - 1)),
    "uuid": _or_null(
        _pattern(
            "GPU-[0-9A-Za-z-]{1,59}",
            "a UUID of a GPU: 'GPU-' and up to 59 letters, digits and '-'",
        )
    ),
    "minor": _or_null(_number(0, 999_999)),
    "mig": _or_null(_truth),
    "model": _or_null(_text),
    "memoryMiB": _or_null(_MEMORY),
}
_GPU_REQUIRED = ("pci", "numa")


# --- every mistake --------------------------------------------------------------------


def _check(name: str, content: Any) -> Iterator[str]:
    if not isinstance(content, dict):
        yield "must hold keys and values, starting with 'model: …'"
        return
    yield from _check_keys("", content, _PROFILE_KEYS, _PROFILE_REQUIRED)
    nodes = content.get("numaNodes")
    if isinstance(nodes, dict):
        yield from _check_nodes(nodes)
    gpus = content.get("gpus")
    count = len(gpus) if isinstance(gpus, list) else None
    if isinstance(gpus, list):
        yield from _check_gpus(name, gpus, nodes)
    yield from _check_table("pcie", content.get("pcie"), count, "X", _LEVEL)
    yield from _check_table("nvlinks", content.get("nvlinks"), count, "0", _NVLINKS)


def _check_keys(
    where: str, content: Mapping[Any, Any], known: Mapping[str, Complaint], required: Iterable[str]
) -> Iterator[str]:
    for key, value in content.items():
        if key not in known:
            close = difflib.get_close_matches(str(key)[:40], known, 1) if _text(key) is None else ()
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{where}{_key(key)}: unknown key{hint}"
        elif (complaint := known[key](value)) is not None:
            yield f"{where}{key}: {complaint}"
    yield from (f"{where}{key}: is missing" for key in required if key not in content)


def _key(key: object) -> str:
    return key if isinstance(key, str) and _text(key) is None and len(key) <= 60 else _show(key)


def _node(key: object) -> int | None:
    """A NUMA node's number. JSON has no keys but texts: "0" is as good as 0."""
    if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,3}", key):
        key = int(key)
    good = isinstance(key, int) and not isinstance(key, bool) and 0 <= key < _NODES_MAX
    return key if isinstance(key, int) and good else None


def _check_nodes(nodes: Mapping[Any, Any]) -> Iterator[str]:
    seen = set()
    for key, cpus in nodes.items():
        node = _node(key)
        if node is None:
            yield f"numaNodes.{_key(key)}: a node is a whole number from 0 to {_NODES_MAX - 1}"
        elif node in seen:
            yield f"numaNodes.{node}: is set twice"
        seen.add(node)
        if (complaint := _CPUS(cpus)) is not None:
            yield f"numaNodes.{_key(key)}: {complaint}"


def _check_gpus(name: str, gpus: list[Any], nodes: Any) -> Iterator[str]:
    if not 1 <= len(gpus) <= MAX_GPUS:
        yield f"gpus: {len(gpus)} GPUs; from 1 to {MAX_GPUS} are possible"
    owners: dict[tuple[str, Any], int] = {}
    for index, gpu in enumerate(gpus):
        if not isinstance(gpu, dict):
            yield f"gpus.{index}: {_show(gpu)} is not a GPU, as in {{pci: '0000:1b:00.0', numa: 0}}"
            continue
        yield from _check_keys(f"gpus.{index}.", gpu, _GPU_KEYS, _GPU_REQUIRED)
        numa = gpu.get("numa")
        well_formed = isinstance(numa, int) and _node(numa) is not None
        if isinstance(nodes, dict) and well_formed and numa not in map(_node, nodes):
            yield f"gpus.{index}.numa: there is no node {numa} in numaNodes"
        # Given values can also meet those that other GPUs have by default.
        unique = {"pci": gpu.get("pci"), "uuid": _uuid(name, index, gpu)}
        for key, value in (unique | {"minor": _minor(index, gpu)}).items():
            if value is None or _GPU_KEYS[key](value) is not None:
                continue
            owner = owners.setdefault((key, value), index)
            if owner != index:
                yield f"gpus.{index}.{key}: {value} is that of GPU {owner} already"


def _check_table(
    key: str, lines: Any, count: int | None, diagonal: str, word: Complaint
) -> Iterator[str]:
    if not isinstance(lines, list):
        return  # said already, or left out
    table = [line.split() for line in lines if isinstance(line, str)]
    if len(table) != len(lines):
        yield f"{key}: every line must be a text; put one with a single number in quotes"
        return
    if count is not None and len(table) != count:
        yield f"{key}: has {len(table)} lines for {count} GPUs"
    for a, row in enumerate(table):
        if len(row) != len(table):
            yield f"{key}.{a}: has {len(row)} columns where the table has {len(table)} lines"
        if a < len(row) and row[a] != diagonal:
            yield f"{key}.{a}: a GPU and itself are {diagonal!r}, not {_show(row[a])}"
        others = {cell for b, cell in enumerate(row) if b != a}
        yield from (f"{key}.{a}: {wrong}" for cell in sorted(others) if (wrong := word(cell)))
        for b, cell in enumerate(row[:a]):
            if a < len(table[b]) and table[b][a] != cell:
                back = _show(table[b][a])
                yield f"{key}.{a}: GPUs {b} and {a} are {back} one way and {_show(cell)} the other"


# --- the profile of a content without mistakes ------------------------------------------


def _uuid(name: str, index: int, gpu: Mapping[str, Any]) -> Any:
    """The same at every start, so that a restarted daemon finds its GPUs again."""
    return gpu.get("uuid") or f"GPU-{uuid.uuid5(_NAMESPACE, f'{name}/{index}')}"


def _minor(index: int, gpu: Mapping[str, Any]) -> Any:
    return index if gpu.get("minor") is None else gpu["minor"]


def _build(name: str, content: Mapping[str, Any]) -> Profile:
    gpus = tuple(
        DriverGpu(
            id=GpuId(_uuid(name, index, gpu)),
            index=index,
            minor=_minor(index, gpu),
            model=gpu.get("model") or content["model"],
            pci_bus_id=gpu["pci"],
            memory_bytes=(gpu.get("memoryMiB") or content["memoryMiB"]) << 20,
            mig_enabled=gpu.get("mig"),
            events=True,
        )
        for index, gpu in enumerate(content["gpus"])
    )
    pcie = [line.split() for line in content["pcie"]]
    nvlinks = [line.split() for line in content.get("nvlinks") or ()]
    links = tuple(
        Link(one.id, other.id, _LEVELS[pcie[a][b]], int(nvlinks[a][b]) if nvlinks else 0)
        for a, one in enumerate(gpus)
        for b, other in enumerate(gpus)
        if a < b
    )
    return Profile(
        name=name,
        driver=DriverInfo(content.get("driver"), content.get("library"), content.get("cuda")),
        gpus=gpus,
        numa=tuple(gpu["numa"] for gpu in content["gpus"]),
        cpus=MappingProxyType({int(key): cpus for key, cpus in content["numaNodes"].items()}),
        links=links,
    )
