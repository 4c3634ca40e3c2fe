"""What a failing driver leads to: every function × every error, a hang and a crash.

``python -m tests.faultmatrix`` writes docs/fault-matrix.md; a test holds the two
together. Error codes are tried at the NVML door, on one GPU of three where the
function is about a GPU; hangs and crashes on the child that has the door.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import pynvml

from deviceplugin.errors import HardwareError
from deviceplugin.hardware.child import ChildHardware
from deviceplugin.model import Address, Reading, Scan
from tests import fakenvml
from tests.fakenvml import FakeGpu, FakeNode
from tests.nvmlchild import Door

Phase = Literal["start", "running"]

FILE: Final = Path(__file__).parent.parent / "docs/fault-matrix.md"

ABOUT_ALL: Final = (
    "nvmlInitWithFlags",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlEventSetCreate",
    "nvmlEventSetWait_v2",
    "nvmlEventSetFree",
    "nvmlShutdown",
)
ABOUT_ONE: Final = (
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
)
AT_THE_END: Final = ("nvmlEventSetFree", "nvmlShutdown")

CODES: Final = {
    code: name.removeprefix("NVML_ERROR_").lower()
    for name, code in sorted(vars(pynvml).items())
    if name.startswith("NVML_ERROR_")
} | {77: "any unknown code"}

ADDRESSES: Final = tuple(Address(number, f"0000:{number + 1:02x}:00.0") for number in range(3))

HANG_S: Final = 1.5
"""Given to a child that hangs; a healthy one on a busy machine needs a tenth of it."""
_starting: Final = threading.Lock()


def node_in(directory: Path) -> FakeNode:
    """Three GPUs with NVLinks between them, one of which goes to a switch."""
    gpus = [FakeGpu(f"GPU-{n}", f"00000000:{n + 1:02X}:00.0") for n in range(3)]
    links: dict[tuple[int, int], int | str | None] = {(0, 0): 1, (1, 0): 0, (1, 1): 2, (2, 0): 1}
    return FakeNode(directory, gpus, {(0, 1): "PIX"}, links)


def prepare(node: FakeNode, function: str) -> None:
    """Make the door come to this function."""
    node.clear_faults()
    if function == "nvmlDeviceGetTemperature":
        node.fail("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NOT_SUPPORTED)


def only(function: str) -> tuple[Address, ...] | None:
    return ADDRESSES if "PciBusId" in function else None


def gpu_of(function: str) -> int | None:
    return 1 if function in ABOUT_ONE else None


# --- what comes out ------------------------------------------------------------------------------


def outcome(usual: Scan, found: Scan, readings: Iterable[Reading], phase: Phase) -> str:
    """What differs from how it is without a fault, as an operator would see it."""
    texts = list(_driver(usual, found))
    here = {gpu.id: gpu for gpu in found.gpus}
    for gpu in usual.gpus:
        now = here.get(gpu.id)
        if now is None:
            reasons = {bad.fault.code for bad in found.unreadable if bad.index == gpu.index}
            why = f" ({reasons.pop()})" if reasons else ""
            gone = "stays listed, unhealthy: absent" if phase == "running" else "is not published"
            texts.append(f"that GPU {gone}{why}")
            continue
        if now.fault is not None:
            texts.append(f"that GPU is unhealthy: {now.fault.code}")
        texts += (text for fact, text in _FACTS.items() if getattr(gpu, fact) != getattr(now, fact))
    faults = {reading.fault.code for reading in readings if reading.fault is not None}
    texts += (f"that GPU is unhealthy: {code}" for code in faults)
    if len(here) == len(usual.gpus) and usual.links != found.links:
        texts.append("links of that GPU unknown or fewer")
    return "; ".join(dict.fromkeys(texts)) or "nothing"


_FACTS: Final = {
    "minor": "minor number unknown (the host's files may tell it)",
    "model": "model unknown",
    "pci_bus_id": "PCI bus id unknown, so no NUMA hint",
    "memory_bytes": "memory size unknown",
    "mig_enabled": "MIG mode unknown",
    "events": "Xids not heard, polled only",
}


def _driver(usual: Scan, found: Scan) -> Iterator[str]:
    for field in ("driver_version", "library_version", "cuda_version"):
        if getattr(found.driver, field) != getattr(usual.driver, field):
            yield f"{field.replace('_', ' ')} unknown"


# --- error codes ---------------------------------------------------------------------------------


def code_outcome(
    door: Door, node: FakeNode, usual: Scan, function: str, code: int, phase: Phase
) -> str:
    """What an error leads to; leaves the door closed."""
    prepare(node, function)
    try:
        if phase == "running":
            door.scan(only(function))
        node.fail(function, code, gpu=gpu_of(function))
        if phase == "running":
            before = door.read()
            door.wait(0.001)
        found = door.scan(only(function))
        readings = door.read() if phase == "start" else (*before, *door.read())
        door.wait(0.001)
    except HardwareError as error:
        return f"driver away: {error.code}"
    finally:
        closed = door.close()
        node.clear_faults()
        door.close()
        door.errors()
    if not closed:
        return "nothing; closed at the next try, or with the child"
    return outcome(usual, found, readings, phase)


# --- hangs and crashes ---------------------------------------------------------------------------


def break_outcome(library: Path, directory: Path, function: str, how: str, phase: Phase) -> str:
    """What a hang or a crash leads to, and that a new child serves."""
    node = node_in(directory)
    prepare(node, function)
    hardware = ChildHardware(library.parent, scan_timeout_s=20, read_timeout_s=HANG_S)

    def break_it() -> None:
        act = node.hang if how == "hang" else node.crash
        act(function, gpu=gpu_of(function))

    try:
        with _starting:
            os.environ |= node.env()
            hardware.start()
        if phase == "running":
            hardware.scan(only(function))
        break_it()
        hardware._scan_timeout_s = HANG_S  # the child is loaded: no more is needed
        text = "nothing"
        try:
            if phase == "running":
                hardware.read()
            hardware.scan(only(function))
            hardware.read()
            if function == "nvmlEventSetWait_v2":
                node.await_call(function)
                hardware.wait(0.2)
                hardware.read()
        except HardwareError as error:
            text = error.code
        ended = hardware.close()
        prepare(node, function)
        hardware._scan_timeout_s = 20
        with _starting:
            os.environ |= node.env()
            hardware.start()
        again = len(hardware.scan(only(function)).gpus)
    finally:
        hardware.close()
    if not ended or again != 3:
        return f"{text}, and NOT replaced"
    if function in AT_THE_END:
        return "nothing; the child is ended all the same" if text == "nothing" else text
    return "not called then" if text == "nothing" else f"{text}, child replaced"


# --- the page ------------------------------------------------------------------------------------


def grouped(outcomes: Mapping[int, str]) -> list[tuple[str, str]]:
    """Outcome and codes; the most common one last, as "any other"."""
    groups: dict[str, list[int]] = {}
    for code, text in outcomes.items():
        groups.setdefault(text, []).append(code)
    ordered = sorted(groups.items(), key=lambda item: len(item[1]))
    *rare, (common, _) = ordered
    named = [(", ".join(sorted(CODES[code] for code in codes)), text) for text, codes in rare]
    return [*named, ("any other" if rare else "any", common)]


def page(library: Path) -> str:
    """The tables of the document, from the mark on."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        node = node_in(directory / "door")
        door = Door(library.parent, node.env())
        try:
            usual = door.scan()
            door.close()
            codes = {
                (function, phase): {
                    code: code_outcome(door, node, usual, function, code, phase) for code in CODES
                }
                for function in (*ABOUT_ALL, *ABOUT_ONE)
                for phase in _PHASES
            }
        finally:
            door.end()
        cells = [
            (function, how, phase)
            for function in (*ABOUT_ALL, *ABOUT_ONE)
            for how in ("hang", "crash")
            for phase in _PHASES
        ]
        with ThreadPoolExecutor(8) as pool:
            broken = pool.map(
                lambda cell: break_outcome(library, directory / "-".join(cell), *cell), cells
            )
            breaks = dict(zip(cells, broken, strict=True))
    lines = [MARK]
    for function in (*ABOUT_ALL, *ABOUT_ONE):
        lines += [
            f"\n### {function}\n",
            "| answers | at the start | while running |",
            "|---|---|---|",
        ]
        start, running = (dict(grouped(codes[function, phase])) for phase in _PHASES)
        for key in sorted({*start, *running}, key=lambda key: (key.startswith("any"), key)):
            lines.append(f"| {key} | {start.get(key, '')} | {running.get(key, '')} |")
        for how in ("hang", "crash"):
            a, b = (breaks[function, how, phase] for phase in _PHASES)
            lines.append(f"| {how} | {a} | {b} |")
    return "\n".join(lines) + "\n"


_PHASES: Final[tuple[Phase, ...]] = ("start", "running")

MARK: Final = "<!-- what follows is made by python -m tests.faultmatrix -->"


def main() -> int:
    with tempfile.TemporaryDirectory() as cache:
        tables = page(fakenvml.build(Path(cache)))
    prose, _, _ = FILE.read_text(encoding="utf-8").partition(MARK)
    FILE.write_text(prose + tables, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
