"""A node without GPUs that looks as if it had some: a fake driver library and the files around it.

``build`` compiles ``nvml.c``, which the process under test loads as
libnvidia-ml.so.1; a ``FakeNode`` writes the script that the library acts, and
may change it at any time, also while the process runs. ``write_sysfs`` and
``write_dev`` make the parts of /sys and /dev that belong to it. The script
language is described at the top of ``nvml.c``.

Nothing here talks to the process under test: all goes through files, and the
library reads them at its next call.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

PcieName = Literal["PSB", "PIX", "PXB", "PHB", "NODE", "SYS"]
"""How ``nvidia-smi topo -m`` names the common ancestor of two GPUs."""

_SOURCE: Final = Path(__file__).with_name("nvml.c")
_SONAME: Final = "libnvidia-ml.so.1"
_FLAGS: Final = ("-std=c11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread")

FUNCTIONS: Final = frozenset(
    re.findall(
        r"^(?:int|const char) \*?(nvml\w+)\(", _SOURCE.read_text(encoding="utf-8"), re.MULTILINE
    )
)
"""All that the library exports."""


class NoCompiler(Exception):
    """There is no C compiler to build the library with."""


def build(cache_dir: Path, without: frozenset[str] = frozenset()) -> Path:
    """Compile the library, once for each ``cache_dir`` and ``without``; give its path.

    Args:
        without: functions that it shall not export, as an older one.
    """
    _check_names(without)
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompiler("no C compiler: install one that answers to 'cc' (Debian: gcc libc6-dev)")
    key = hashlib.sha256(_SOURCE.read_bytes() + "\n".join(sorted(without)).encode()).hexdigest()
    library = cache_dir / f"nvml-{key[:16]}" / _SONAME
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
        exports = Path(scratch, "exports")
        hidden = "".join(f"{name}; " for name in sorted(without))
        exports.write_text(f"{{ global: nvml*; local: {hidden}*; }};\n", encoding="utf-8")
        built = Path(scratch, _SONAME)
        linking = (f"-Wl,-soname,{_SONAME}", f"-Wl,--version-script,{exports}")
        subprocess.run([compiler, *_FLAGS, *linking, "-o", built, _SOURCE], check=True)
        # another test process may be building the same one: the last to finish wins, whole
        built.replace(library)
    return library


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """One GPU as the driver shall describe it.

    Attributes:
        pci_bus_id: as the driver writes it, "00000000:1B:00.0".
        minor: None means the GPU's number.
        events: which event types the driver reports: "all", "xid", "none" or a mask.
        action: number of the recovery action; None, as for the next ones: not supported.
        fabric: number of the state, or "state/status".
        errors: uncorrected memory errors since the last reset.
        throttle: mask of the reasons for lower clocks.
    """

    uuid: str
    pci_bus_id: str
    minor: int | None = None
    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 85520809984
    used_bytes: int = 0
    mig: Literal["disabled", "enabled", "none"] = "disabled"
    temperature_celsius: int = 40
    events: Literal["all", "xid", "none"] | int = "all"
    action: int | None = None
    remap: Literal["none", "pending", "failed"] | None = None
    fabric: str | None = None
    errors: int | None = None
    throttle: int | None = None

    @property
    def sysfs_id(self) -> str:
        """The PCI bus id as sysfs writes it, "0000:1b:00.0"."""
        domain, rest = self.pci_bus_id.lower().split(":", 1)
        return f"{int(domain, 16):04x}:{rest}"


class FakeNode:
    """The driver of one node, as it shall appear to the processes that get its ``env``.

    Every method takes effect at the next call into the library, in every such
    process. GPUs have numbers, which they keep: the index that the driver
    gives is the GPU's place among those that are there at nvmlInit.
    """

    def __init__(
        self,
        directory: Path,
        gpus: Sequence[FakeGpu] = (),
        pcie: Mapping[tuple[int, int], PcieName] | None = None,
        nvlinks: Mapping[tuple[int, int], int | str | None] | None = None,
        *,
        driver: str = "550.54.15",
        nvml: str = "12.550.54.15",
        cuda: int = 12040,
        sticky_lost: bool = True,
    ) -> None:
        """Describe the node in ``directory``, which is made if need be.

        Args:
            pcie: the common ancestor of two GPUs; of those not named it is SYS.
            nvlinks: for (GPU, link number) where it goes: a GPU's number, the
                PCI bus id of a switch, or None for a link that is down.
            cuda: 1000 × major + 10 × minor.
            sticky_lost: a lost GPU answers again only after a new nvmlInit.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory: Final = directory
        self.gpus: Final = dict(enumerate(gpus))
        self._pcie = dict(pcie or {})
        self._nvlinks = dict(nvlinks or {})
        self._head = (
            f"driver {driver}",
            f"nvml {nvml}",
            f"cuda {cuda}",
            f"sticky-lost {'on' if sticky_lost else 'off'}",
        )
        self._lost: set[int] = set()
        self._faults: list[str] = []
        self._fault_ids = 0
        self._mismatch = False
        self._stamp_ns = 0
        for name in ("events", "log"):
            (directory / name).touch()
        self._write()

    def env(self, library: Path | None = None) -> dict[str, str]:
        """Environment variables for the process under test.

        Args:
            library: from ``build``; makes the process find it by its name, as
                it would the real one. Else the process must load it by path.
        """
        env = {"FAKE_NVML": str(self.directory)}
        if library is not None:
            # the interpreter itself may be found through what is there already
            inherited = os.environ.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(library.parent), inherited)))
        return env

    # what goes wrong; gpu: on this GPU only; after: from the n-th such call on;
    # count: so many times. Calls are counted in each process.

    def fail(
        self,
        function: str,
        code: int,
        gpu: int | None = None,
        after: int = 1,
        count: int | None = None,
    ) -> None:
        """Make a function give an error code."""
        self._add_fault("fail", function, code=code, gpu=gpu, after=after, count=count)

    def slow(
        self,
        function: str,
        ms: int,
        gpu: int | None = None,
        after: int = 1,
        count: int | None = None,
    ) -> None:
        """Make a function take longer."""
        self._add_fault("slow", function, ms=ms, gpu=gpu, after=after, count=count)

    def hang(
        self, function: str, gpu: int | None = None, after: int = 1, count: int | None = None
    ) -> None:
        """Make a function never return; a thread that is in it stays there."""
        self._add_fault("hang", function, gpu=gpu, after=after, count=count)

    def crash(
        self, function: str, gpu: int | None = None, after: int = 1, count: int | None = None
    ) -> None:
        """Make a function kill its process by SIGSEGV."""
        self._add_fault("crash", function, gpu=gpu, after=after, count=count)

    def mismatch(self, active: bool = True) -> None:
        """Make nvmlInit say that library and kernel module differ, as after a driver upgrade."""
        self._mismatch = active
        self._write()

    def clear_faults(self) -> None:
        """Undo fail, slow, hang, crash and mismatch; a lost GPU stays lost."""
        self._faults.clear()
        self._mismatch = False
        self._write()

    # what happens to GPUs

    def lose(self, gpu: int) -> None:
        """Let a GPU fall off the bus: it is counted, but answers nothing."""
        self._lost.add(gpu)
        self._write()

    def restore(self, gpu: int) -> None:
        """Bring a lost GPU back."""
        self._lost.remove(gpu)
        self._write()

    def remove(self, gpu: int) -> None:
        """Take a GPU out: who is initialised sees it lost; the next nvmlInit doesn't count it."""
        del self.gpus[gpu]
        self._write()

    def put(self, number: int, gpu: FakeGpu) -> None:
        """Add a GPU, or change the one of this number."""
        self.gpus[number] = gpu
        self._write()

    def change(self, gpu: int, **facts: object) -> None:
        """Change what is told of a GPU: fields of ``FakeGpu``."""
        self.put(gpu, replace(self.gpus[gpu], **facts))  # type: ignore[arg-type] # its fields

    def xid(self, gpu: int | None, code: int, gi: int | None = None, ci: int | None = None) -> None:
        """Report an Xid error; of no known GPU with None, of a MIG slice with gi and ci."""
        slice_ = _options(gi=gi, ci=ci)
        self._append_event(f"xid {'none' if gpu is None else gpu} {code}{slice_}")

    def event(self, gpu: int, event_type: int, data: int = 0) -> None:
        """Report an event of any type."""
        self._append_event(f"event {gpu} {event_type} {data}")

    # what was called

    def calls(self) -> list[str]:
        """All calls so far, of all processes: "nvmlShutdown", "nvmlDeviceGetUUID 2"."""
        return (self.directory / "log").read_text(encoding="utf-8").splitlines()

    def await_call(self, call: str, count: int = 1, timeout_s: float = 10.0) -> None:
        """Wait until a call was made so many times: it has begun, and may still be going on.

        Raises:
            TimeoutError: it was not.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.calls().count(call) < count:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{call} was not called {count} times in {timeout_s} s")
            time.sleep(0.002)

    def forget_calls(self) -> None:
        """Begin the log anew."""
        os.truncate(self.directory / "log", 0)

    def _add_fault(self, kind: str, function: str, **options: int | None) -> None:
        _check_names((function,))
        self._fault_ids += 1  # the same fault twice counts its calls twice
        self._faults.append(f"{kind} {function}{_options(**options, id=self._fault_ids)}")
        self._write()

    def _append_event(self, line: str) -> None:
        with (self.directory / "events").open("a", encoding="utf-8") as events:
            events.write(line + "\n")

    def _lines(self) -> Iterable[str]:
        yield from self._head
        for number, gpu in self.gpus.items():
            yield (
                f"gpu {number} uuid={_word(gpu.uuid)} name={_word(gpu.name)}"
                f" pci={_word(gpu.pci_bus_id)}"
                f" minor={number if gpu.minor is None else gpu.minor}"
                f" memory={gpu.memory_bytes} used={gpu.used_bytes} mig={gpu.mig}"
                f" temperature={gpu.temperature_celsius} events={gpu.events}"
                + _options(
                    action=gpu.action,
                    remap=gpu.remap,
                    fabric=gpu.fabric,
                    errors=gpu.errors,
                    throttle=gpu.throttle,
                )
            )
        for (a, b), level in self._pcie.items():
            yield f"pcie {a} {b} {level}"
        for (number, link), remote in self._nvlinks.items():
            match remote:
                case None:
                    yield f"nvlink {number} {link} down"
                case int():
                    yield f"nvlink {number} {link} gpu {remote}"
                case str():
                    yield f"nvlink {number} {link} switch {_word(remote)}"
        for number in sorted(self._lost):
            yield f"lost {number}"
        if self._mismatch:
            yield "mismatch"
        yield from self._faults

    def _write(self) -> None:
        fresh = self.directory / "script.new"
        fresh.write_text("".join(f"{line}\n" for line in self._lines()), encoding="utf-8")
        # The library looks at inode, size and time. The kernel's file clock ticks every few
        # milliseconds and inodes are used again, so the times must be made to differ.
        self._stamp_ns = max(time.time_ns(), self._stamp_ns + 1)
        os.utime(fresh, ns=(self._stamp_ns, self._stamp_ns))
        fresh.replace(self.directory / "script")


def h100x8(directory: Path) -> FakeNode:
    """Eight H100 as in an HGX board: all NVLinks go to four switches; two NUMA nodes of four."""
    buses = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
    switches = [f"00000000:{bus:02X}:00.0" for bus in (0x05, 0x06, 0x07, 0x08)]
    return FakeNode(
        directory,
        [FakeGpu(_uuid(i), f"00000000:{bus:02X}:00.0") for i, bus in enumerate(buses)],
        {(a, b): "NODE" if a // 4 == b // 4 else "SYS" for a, b in combinations(range(8), 2)},
        {(gpu, link): switches[link % 4] for gpu in range(8) for link in range(18)},
    )


def pcie_only(directory: Path, count: int) -> FakeNode:
    """Up to fourteen L4 without NVLink and MIG, all in one NUMA node."""
    return FakeNode(
        directory,
        [
            FakeGpu(
                _uuid(i),
                f"00000000:{0x11 + 0x10 * i:02X}:00.0",
                name="NVIDIA L4",
                memory_bytes=24152899584,
                mig="none",
            )
            for i in range(count)
        ],
        dict.fromkeys(combinations(range(count), 2), "NODE"),
    )


def write_sysfs(
    root: Path,
    numa_nodes: Mapping[str, int | None],
    cpus: Mapping[int, str],
    bridge_numa_nodes: Mapping[str, int | None] | None = None,
) -> None:
    """Make the part of /sys that tells where PCI devices and CPUs sit.

    Each device gets a PCI bridge of its own, one bus below it:
    ``devices/pci0000:1a/0000:1a:01.0/0000:1b:00.0``.

    Args:
        numa_nodes: for a PCI bus id as sysfs writes it, the NUMA node; -1 is
            what Linux writes when the firmware doesn't tell; None leaves the
            file out, as a kernel without NUMA does.
        cpus: for each NUMA node its CPUs as a list, "0-15,32"; may be empty.
        bridge_numa_nodes: as ``numa_nodes``, for the bridge above the device
            where it differs.
    """
    bridges = {**numa_nodes, **(bridge_numa_nodes or {})}
    links = root / "bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    for pci_bus_id, numa_node in numa_nodes.items():
        domain, bus, _ = pci_bus_id.split(":")
        above = f"{domain}:{int(bus, 16) - 1:02x}"
        bridge = Path(f"devices/pci{above}/{above}:01.0")
        for device, node in ((bridge, bridges[pci_bus_id]), (bridge / pci_bus_id, numa_node)):
            (root / device).mkdir(parents=True)
            (links / device.name).symlink_to(Path("../../..") / device)
            if node is not None:
                (root / device / "numa_node").write_text(f"{node}\n", encoding="utf-8")
    nodes = root / "devices/system/node"
    nodes.mkdir(parents=True, exist_ok=True)
    for node, listed in cpus.items():
        (nodes / f"node{node}").mkdir()
        (nodes / f"node{node}/cpulist").write_text(f"{listed}\n", encoding="utf-8")
    everywhere, with_cpus = sorted(cpus), sorted(node for node in cpus if cpus[node])
    for name, members in (
        ("possible", everywhere),
        ("online", everywhere),
        ("has_memory", everywhere),
        ("has_cpu", with_cpus),
    ):
        (nodes / name).write_text(f"{_ranges(members)}\n", encoding="utf-8")


def write_dev(root: Path, minors: Iterable[int]) -> None:
    """Make what stands for /dev: links to a character device, named as the driver's nodes."""
    root.mkdir(parents=True, exist_ok=True)
    for name in (*(f"nvidia{minor}" for minor in minors), "nvidiactl", "nvidia-uvm"):
        (root / name).symlink_to("/dev/null")


def _check_names(functions: Iterable[str]) -> None:
    """A name that is not in the library would silently do nothing."""
    unknown = sorted(set(functions) - FUNCTIONS)
    if unknown:
        raise ValueError(f"the fake library has no {', '.join(unknown)}")


def _options(**options: int | str | None) -> str:
    return "".join(f" {key}={value}" for key, value in options.items() if value is not None)


def _word(text: str) -> str:
    return quote(text, safe="/:.,+()[]=")


def _ranges(numbers: Sequence[int]) -> str:
    """As Linux writes a list of numbers: 0, 1, 2, 4 is "0-2,4"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _uuid(number: int) -> str:
    return f"GPU-{number:08x}-5eed-4a11-8c3d-00000000000{number:x}"
