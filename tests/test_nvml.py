"""deviceplugin.hardware.nvml, against the fake driver library.

The door's faults and facts are those of a library, so each test talks to a
door in a child process; the library is looked for below a driver root that
holds nothing else.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import pynvml
import pytest

from deviceplugin.errors import DriverMismatch, DriverMissing, HardwareError
from deviceplugin.hardware.nvml.calls import bus_id
from deviceplugin.model import (
    Address,
    Alarm,
    CallError,
    DriverGpu,
    DriverInfo,
    Fabric,
    Fault,
    GpuId,
    Link,
    PcieLevel,
    Reading,
    RecoveryAction,
    RowRemap,
    Scan,
    UnreadableGpu,
    XidEvent,
)
from tests import fakenvml
from tests.fakenvml import FakeGpu, FakeNode
from tests.nvmlchild import Door

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
CORRUPTED_INFOROM: Final = 14
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN: Final = 999

CODES: Final = {
    **{
        code: name.removeprefix("NVML_ERROR_").lower()
        for name, code in vars(pynvml).items()
        if name.startswith("NVML_ERROR_")
    },
    77: "error_77",  # one that is not known yet
}
"""Every error code, and what the door calls it."""

GONE: Final = {
    UNINITIALIZED: HardwareError,
    DRIVER_NOT_LOADED: DriverMissing,
    LIBRARY_NOT_FOUND: DriverMissing,
    LIB_RM_VERSION_MISMATCH: DriverMismatch,
}
"""Codes that say of any call that the driver cannot be used, and what they become."""

EXPECTED: Final = {NOT_SUPPORTED, FUNCTION_NOT_FOUND}
"""Codes that are no error to count."""

FUNCTIONS: Final = {
    "nvmlInitWithFlags": "nvmlInit",
    "nvmlShutdown": "nvmlShutdown",
    "nvmlSystemGetDriverVersion": "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion": "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion_v2": "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount_v2": "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex_v2": "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByPciBusId_v2": "nvmlDeviceGetHandleByPciBusId",
    "nvmlDeviceGetUUID": "nvmlDeviceGetUUID",
    "nvmlDeviceGetMinorNumber": "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetName": "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3": "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMemoryInfo": "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode": "nvmlDeviceGetMigMode",
    "nvmlDeviceGetTemperature": "nvmlDeviceGetTemperature",
    "nvmlDeviceGetFieldValues": "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetRemappedRows": "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetGpuFabricInfoV": "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetTotalEccErrors": "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetTopologyCommonAncestor": "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetNvLinkState": "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemoteDeviceType": "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetSupportedEventTypes": "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents": "nvmlDeviceRegisterEvents",
    "nvmlEventSetCreate": "nvmlEventSetCreate",
    "nvmlEventSetWait_v2": "nvmlEventSetWait_v2",
    "nvmlEventSetFree": "nvmlEventSetFree",
}
"""What the door calls: the library's name, and pynvml's."""

OF_THE_WHOLE: Final = {"nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlEventSetWait_v2"}
"""Functions without which there is nothing to serve, whatever they answer."""

GPU_1: Final = Address(1, "0000:02:00.0")

AT_THE_END: Final = {"nvmlEventSetFree", "nvmlShutdown"}

LOST: Final = Fault("lost", "the driver says that the GPU is lost")
RESET: Final = Fault("reset-required", "the driver says that the GPU has to be reset")

Open = Callable[..., Door]


@pytest.fixture
def open_door(fake_library: Path) -> Iterator[Open]:
    """Opens doors on a node; ends them with the test."""
    doors: list[Door] = []

    def open_door(
        node: FakeNode, driver_root: Path = fake_library.parent, library: Path | None = None
    ) -> Door:
        door = Door(driver_root, node.env(library))
        doors.append(door)
        return door

    yield open_door
    for door in doors:
        door.end()


def triangle(directory: Path) -> FakeNode:
    """Three GPUs: two NVLinks between 0 and 1, one between 0 and 2, none between 1 and 2."""
    gpus = [FakeGpu(f"GPU-{n}", f"00000000:{n + 1:02X}:00.0") for n in range(3)]
    nvlinks = {(0, 0): 1, (0, 1): 1, (0, 2): 2, (1, 0): 0, (1, 1): 0, (1, 2): None, (2, 0): 0}
    return FakeNode(directory, gpus, {(0, 1): "PIX", (0, 2): "PHB"}, nvlinks)


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return triangle(tmp_path / "node")


def described(number: int, **changes: Any) -> DriverGpu:
    """A GPU of the triangle, as the door ought to describe it."""
    gpu = DriverGpu(
        id=GpuId(f"GPU-{number}"),
        index=number,
        minor=number,
        model="NVIDIA H100 80GB HBM3",
        pci_bus_id=f"0000:0{number + 1}:00.0",
        memory_bytes=85520809984,
        mig_enabled=False,
        events=True,
    )
    return replace(gpu, **changes)


def ids(*numbers: int) -> tuple[GpuId, ...]:
    return tuple(GpuId(f"GPU-{number}") for number in numbers)


def link(a: int, b: int, pcie: PcieLevel, nvlinks: int | None) -> Link:
    return Link(GpuId(f"GPU-{a}"), GpuId(f"GPU-{b}"), pcie, nvlinks)


TRIANGLE: Final = Scan(
    DriverInfo("550.54.15", "12.550.54.15", "12.4"),
    (described(0), described(1), described(2)),
    (),
    (
        link(0, 1, PcieLevel.PIX, 2),
        link(0, 2, PcieLevel.PHB, 1),
        link(1, 2, PcieLevel.SYS, 0),
    ),
)


def with_gpu(number: int, **changes: Any) -> tuple[DriverGpu, ...]:
    """The triangle's GPUs, one of them changed."""
    return tuple(described(n, **(changes if n == number else {})) for n in range(3))


def without_nvlinks(*numbers: int) -> tuple[Link, ...]:
    """The triangle's links, with unknown NVLinks for all pairs of these GPUs."""
    return tuple(
        replace(link, nvlinks=None) if {link.a, link.b} & set(ids(*numbers)) else link
        for link in TRIANGLE.links
    )


def gpus_of(scan: Scan) -> list[str]:
    return [gpu.id for gpu in scan.gpus]


def rewrite(node: FakeNode, old: str, new: str) -> None:
    """Change the script itself, for what FakeGpu has no words for."""
    script = node.directory / "script"
    text = script.read_text(encoding="utf-8")
    assert old in text
    fresh = node.directory / "script.changed"
    fresh.write_text(text.replace(old, new), encoding="utf-8")
    fresh.replace(script)


# --- what a scan tells ----------------------------------------------------------------


def test_an_hgx_node_is_described_in_full(tmp_path: Path, open_door: Open) -> None:
    door = open_door(fakenvml.h100x8(tmp_path))
    scan = door.scan()
    assert scan.driver == DriverInfo("550.54.15", "12.550.54.15", "12.4")
    assert scan.gpus[7] == DriverGpu(
        id=GpuId("GPU-00000007-5eed-4a11-8c3d-000000000007"),
        index=7,
        minor=7,
        model="NVIDIA H100 80GB HBM3",
        pci_bus_id="0000:df:00.0",
        memory_bytes=85520809984,
        mig_enabled=False,
        events=True,
        fault=None,
    )
    assert [gpu.index for gpu in scan.gpus] == list(range(8))
    assert [gpu.pci_bus_id for gpu in scan.gpus] == [
        f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    ]
    assert scan.unreadable == ()
    assert scan.links == tuple(
        Link(
            scan.gpus[a].id,
            scan.gpus[b].id,
            PcieLevel.NODE if a // 4 == b // 4 else PcieLevel.SYS,
            18,
        )
        for a, b in combinations(range(8), 2)
    )
    assert door.read() == tuple(Reading(gpu.id) for gpu in scan.gpus)
    assert door.errors() == ()


def test_nvlinks_between_two_gpus_are_counted(node: FakeNode, open_door: Open) -> None:
    assert open_door(node).scan() == TRIANGLE


def test_nvlinks_that_differ_from_side_to_side_count_as_the_fewer(
    tmp_path: Path, open_door: Open
) -> None:
    gpus = [FakeGpu(f"GPU-{n}", f"00000000:{n + 1:02X}:00.0") for n in range(3)]
    switch = "00000000:05:00.0"
    door = open_door(
        FakeNode(
            tmp_path,
            gpus,
            nvlinks={
                **dict.fromkeys([(0, 0), (0, 1), (0, 2)], 1),
                **dict.fromkeys([(1, 0), (1, 1)], 0),
                (0, 3): 2,
                **dict.fromkeys([(1, 4), (1, 5), (2, 4)], switch),
            },
        )
    )
    assert [(link.a, link.b, link.nvlinks) for link in door.scan().links] == [
        (*ids(0, 1), 2),
        (*ids(0, 2), 0),
        (*ids(1, 2), 1),
    ]


def test_an_nvlink_to_something_that_is_no_gpu_of_ours_counts_nothing(
    node: FakeNode, open_door: Open
) -> None:
    node.lose(2)
    scan = open_door(node).scan()
    assert scan.links == (link(0, 1, PcieLevel.PIX, 2),)


def test_every_pcie_distance_has_its_level(tmp_path: Path, open_door: Open) -> None:
    levels: dict[tuple[int, int], fakenvml.PcieName] = {
        (0, 1): "PSB",
        (0, 2): "PIX",
        (0, 3): "PXB",
        (1, 2): "PHB",
        (1, 3): "NODE",
        (2, 3): "SYS",
    }
    gpus = [FakeGpu(f"GPU-{n}", f"00000000:{n + 1:02X}:00.0", mig="none") for n in range(4)]
    scan = open_door(FakeNode(tmp_path, gpus, levels)).scan()
    assert {(link.a, link.b): (link.pcie.name, link.nvlinks) for link in scan.links} == {
        ids(*pair): (name, 0) for pair, name in levels.items()
    }
    assert [gpu.mig_enabled for gpu in scan.gpus] == [None] * 4


def test_a_gpu_is_described_with_its_own_minor_number_mig_mode_and_long_domain(
    tmp_path: Path, open_door: Open
) -> None:
    gpu = FakeGpu("GPU-0", "00010A3F:0C:00.0", minor=13, mig="enabled", memory_bytes=1 << 40)
    scan = open_door(FakeNode(tmp_path, [gpu], cuda=13010)).scan()
    assert scan.driver.cuda_version == "13.1"
    assert scan.gpus == (
        described(0, minor=13, pci_bus_id="10a3f:0c:00.0", mig_enabled=True, memory_bytes=1 << 40),
    )


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (b"00000000:1B:00.0", "0000:1b:00.0"),
        (b"0000:1b:00.0", "0000:1b:00.0"),
        (b"0001ABCD:FF:1F.7", "1abcd:ff:1f.7"),
        (b"", None),
        (b"1B:00.0", None),
        (b"00000000:1B:00.8", None),
        (b"00000000:1B:00.0 ", None),
        (b"../../../../etc", None),
        (b"\xff\xfe:1B:00.0", None),
    ],
)
def test_only_a_bus_id_is_taken_for_one(told: bytes, kept: str | None) -> None:
    info = pynvml.nvmlPciInfo_t()
    info.busId = told
    assert bus_id(info) == kept


def test_a_node_without_gpus_has_an_empty_scan(tmp_path: Path, open_door: Open) -> None:
    door = open_door(FakeNode(tmp_path))
    assert door.scan() == Scan(TRIANGLE.driver, ())
    assert door.read() == ()
    assert door.wait(0.001) == ()


def test_a_name_that_is_empty_or_no_text_is_not_known(node: FakeNode, open_door: Open) -> None:
    rewrite(node, "gpu 0 uuid=GPU-0 name=NVIDIA%20H100", "gpu 0 uuid=GPU-0 name=%C3%28")
    rewrite(node, "gpu 1 uuid=GPU-1 name=NVIDIA%20H100%2080GB%20HBM3", "gpu 1 uuid=GPU-1 name=")
    scan = open_door(node).scan()
    assert scan == replace(
        TRIANGLE, gpus=(described(0, model=None), described(1, model=None), described(2))
    )


def test_a_gpu_whose_uuid_is_no_text_cannot_be_published(node: FakeNode, open_door: Open) -> None:
    rewrite(node, "uuid=GPU-1", "uuid=GPU-%FF")
    scan = open_door(node).scan()
    assert gpus_of(scan) == ["GPU-0", "GPU-2"]
    assert scan.unreadable == (UnreadableGpu(1, Fault("unreadable", "its UUID is no text")),)


def test_of_two_gpus_with_one_uuid_only_the_first_can_be_published(
    node: FakeNode, open_door: Open
) -> None:
    node.put(2, FakeGpu("GPU-0", "00000000:03:00.0"))
    door = open_door(node)
    scan = door.scan()
    assert scan.gpus == (described(0), described(1))
    assert scan.links == (link(0, 1, PcieLevel.PIX, 2),)
    assert scan.unreadable == (
        UnreadableGpu(2, Fault("unreadable", "another GPU has its UUID, GPU-0")),
    )
    assert door.read() == (Reading(GpuId("GPU-0")), Reading(GpuId("GPU-1")))


def test_a_driver_that_takes_its_time_is_described_all_the_same(
    node: FakeNode, open_door: Open
) -> None:
    node.slow("nvmlInitWithFlags", ms=30)
    node.slow("nvmlDeviceGetUUID", ms=20)
    node.slow("nvmlDeviceGetMemoryInfo", ms=20, gpu=1)
    door = open_door(node)
    assert door.scan() == TRIANGLE
    assert door.read() == tuple(Reading(gpu.id) for gpu in TRIANGLE.gpus)


# --- where the library is -------------------------------------------------------------


@pytest.mark.parametrize(
    "directory",
    [
        "usr/lib64",
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu",
        "usr/local/nvidia/lib64",
        "home/kubernetes/bin/nvidia/lib64",
        "",
    ],
)
def test_the_library_is_found_below_the_driver_root(
    directory: str, node: FakeNode, tmp_path: Path, fake_library: Path, open_door: Open
) -> None:
    root = tmp_path / "root"
    (root / directory).mkdir(parents=True)
    shutil.copy(fake_library, root / directory)
    assert open_door(node, root).scan() == TRIANGLE


def test_the_driver_root_comes_before_the_places_that_the_loader_knows(
    node: FakeNode, fake_library: Path, open_door: Open
) -> None:
    older = build_without(fake_library, "nvmlDeviceGetMigMode")
    scan = open_door(node, older.parent, library=fake_library).scan()
    assert [gpu.mig_enabled for gpu in scan.gpus] == [None] * 3


def test_a_library_for_another_machine_does_not_end_the_search(
    node: FakeNode, tmp_path: Path, fake_library: Path, open_door: Open
) -> None:
    root = tmp_path / "root"
    for directory in ("usr/lib64", "usr/lib"):
        (root / directory).mkdir(parents=True)
    (root / "usr/lib64/libnvidia-ml.so.1").write_bytes(b"\x7fELF of another kind")
    shutil.copy(fake_library, root / "usr/lib")
    assert open_door(node, root).scan() == TRIANGLE


def test_a_library_that_cannot_be_loaded_is_named(
    node: FakeNode, tmp_path: Path, open_door: Open
) -> None:
    library = tmp_path / "root/usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    door = open_door(node, tmp_path / "root")
    with pytest.raises(DriverMissing, match=f"{library} cannot be loaded: .*too short"):
        door.scan()
    library.unlink()
    library.symlink_to(library)
    with pytest.raises(DriverMissing, match=r"no libnvidia-ml\.so\.1 below"):
        door.scan()


def test_a_driver_root_that_cannot_be_looked_into_is_one_without_a_library(
    node: FakeNode, tmp_path: Path, open_door: Open
) -> None:
    door = open_door(node, tmp_path / ("too-long" * 100))
    with pytest.raises(DriverMissing):
        door.scan()


def test_a_driver_root_without_a_library_says_what_to_check_and_may_get_one(
    node: FakeNode, tmp_path: Path, fake_library: Path, open_door: Open
) -> None:
    root = tmp_path / "root"
    door = open_door(node, root, library=fake_library)
    with pytest.raises(DriverMissing, match=f"below {root}: point --driver-root at") as caught:
        door.scan()
    assert (caught.value.call, caught.value.driver_code) == ("", None)
    root.mkdir()
    shutil.copy(fake_library, root)
    assert door.scan() == TRIANGLE


@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None, reason="there is a real driver library"
)
def test_a_machine_without_a_library_is_told_how_to_get_one(
    node: FakeNode, open_door: Open
) -> None:
    door = open_door(node, Path("/"))
    with pytest.raises(DriverMissing, match="install the NVIDIA driver, run the pod") as caught:
        door.scan()
    assert (caught.value.call, caught.value.driver_code) == ("nvmlInit", LIBRARY_NOT_FOUND)
    assert door.errors() == (CallError("nvmlInit", "library_not_found"),)


# --- a driver that cannot be used -----------------------------------------------------


def test_a_driver_that_is_not_loaded_is_missing_until_it_is(
    node: FakeNode, open_door: Open
) -> None:
    script = node.directory / "script"
    script.rename(node.directory / "kept")
    door = open_door(node)
    with pytest.raises(DriverMissing, match="kernel driver is not loaded or /dev/nvidiactl"):
        door.scan()
    assert door.errors() == (CallError("nvmlInit", "driver_not_loaded"),)
    door.close()
    (node.directory / "kept").rename(script)
    assert door.scan() == TRIANGLE


def test_library_and_kernel_driver_may_differ_for_a_while(node: FakeNode, open_door: Open) -> None:
    node.mismatch()
    door = open_door(node)
    with pytest.raises(DriverMismatch, match="differ in version: an upgrade") as caught:
        door.scan()
    assert (caught.value.call, caught.value.driver_code) == ("nvmlInit", LIB_RM_VERSION_MISMATCH)
    door.close()
    node.mismatch(False)
    assert door.scan() == TRIANGLE


@pytest.fixture(scope="module")
def one_for_many(
    fake_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FakeNode, Door]]:
    node = triangle(tmp_path_factory.mktemp("shared"))
    door = Door(fake_library.parent, node.env())
    yield node, door
    door.end()


@pytest.fixture
def shared(one_for_many: tuple[FakeNode, Door]) -> tuple[FakeNode, Door]:
    """A node without faults and a closed door, for the tests that try everything there is:
    a process for each would take its time."""
    node, door = one_for_many
    node.clear_faults()
    door.close()
    door.errors()
    return node, door


def everything(node: FakeNode, door: Door) -> type[HardwareError] | None:
    """A session with every operation. What it ended with, if not well."""
    node.xid(0, 13)
    try:
        assert [gpu.index for gpu in door.scan().gpus] in ([0, 1, 2], [])
        assert [gpu.index for gpu in door.scan((GPU_1,)).gpus] in ([1], [])
        door.read()
        door.wait(0.001)
    except HardwareError as error:
        return type(error)
    finally:
        door.close()
    return None


def test_the_functions_tried_here_are_all_that_the_door_calls(
    node: FakeNode, open_door: Open
) -> None:
    node.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)  # then it asks for the temperature
    everything(node, open_door(node))
    assert {call.split()[0] for call in node.calls()} == FUNCTIONS.keys()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_whatever_a_function_answers_is_a_fact_less_or_a_driver_that_cannot_be_used(
    function: str, shared: tuple[FakeNode, Door]
) -> None:
    node, door = shared
    for code, name in CODES.items():
        node.clear_faults()
        if function == "nvmlDeviceGetTemperature":
            node.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
        node.fail(function, code)
        ended = everything(node, door)
        counted = CallError(FUNCTIONS[function], name) in door.errors()
        if function in AT_THE_END:
            assert ended is None, name
        elif code in GONE:
            assert ended is GONE[code], name
        elif function == "nvmlEventSetWait_v2":
            heard = EXPECTED | {TIMEOUT, GPU_IS_LOST, RESET_REQUIRED}
            assert ended is (None if code in heard else HardwareError), name
        else:
            assert ended is (HardwareError if function in OF_THE_WHOLE else None), name
        usual = set(EXPECTED)
        if function == "nvmlDeviceGetNvLinkState":
            usual.add(INVALID_ARGUMENT)  # there are no more links
        if function == "nvmlEventSetWait_v2":
            usual.add(TIMEOUT)
        if function == "nvmlDeviceGetHandleByPciBusId_v2":
            usual.add(NOT_FOUND)
        assert counted is (code not in usual), name
    node.clear_faults()
    assert door.scan() == TRIANGLE, "nothing of all that lasts"
    door.close()
    assert door.errors() == ()


# --- a GPU that tells less ------------------------------------------------------------


PARTIAL: Final[Mapping[str, Scan]] = {
    "nvmlDeviceGetMinorNumber": replace(TRIANGLE, gpus=with_gpu(1, minor=None)),
    "nvmlDeviceGetName": replace(TRIANGLE, gpus=with_gpu(1, model=None)),
    "nvmlDeviceGetPciInfo_v3": replace(
        TRIANGLE, gpus=with_gpu(1, pci_bus_id=None), links=without_nvlinks(1)
    ),
    "nvmlDeviceGetMemoryInfo": replace(TRIANGLE, gpus=with_gpu(1, memory_bytes=None)),
    "nvmlDeviceGetMigMode": replace(TRIANGLE, gpus=with_gpu(1, mig_enabled=None)),
    "nvmlDeviceRegisterEvents": replace(TRIANGLE, gpus=with_gpu(1, events=False)),
    "nvmlDeviceGetSupportedEventTypes": TRIANGLE,
    "nvmlDeviceGetNvLinkRemoteDeviceType": TRIANGLE,
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": replace(TRIANGLE, links=without_nvlinks(1)),
    "nvmlDeviceGetTopologyCommonAncestor": replace(
        TRIANGLE,
        links=(
            link(0, 1, PcieLevel.UNKNOWN, 2),
            link(0, 2, PcieLevel.PHB, 1),
            link(1, 2, PcieLevel.UNKNOWN, 0),
        ),
    ),
}
"""What is left when a function fails for GPU 1."""


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, CORRUPTED_INFOROM, UNKNOWN])
def test_a_call_that_fails_for_one_gpu_costs_the_one_fact(
    code: int, shared: tuple[FakeNode, Door]
) -> None:
    node, door = shared
    for function, left in PARTIAL.items():
        node.clear_faults()
        node.fail(function, code, gpu=1)
        assert door.scan() == left, function
        door.close()
        errors = set() if code in EXPECTED else {CallError(FUNCTIONS[function], CODES[code])}
        assert set(door.errors()) == errors, function


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (UNKNOWN, without_nvlinks(1)),
        (NO_PERMISSION, without_nvlinks(1)),
        (NOT_SUPPORTED, (replace(TRIANGLE.links[0], nvlinks=0), *TRIANGLE.links[1:])),
        (INVALID_ARGUMENT, (replace(TRIANGLE.links[0], nvlinks=1), *TRIANGLE.links[1:])),
    ],
    ids=["unknown", "no_permission", "not_supported", "invalid_argument"],
)
def test_an_nvlink_that_does_not_exist_is_told_from_one_that_cannot_be_read(
    code: int, left: tuple[Link, ...], node: FakeNode, open_door: Open
) -> None:
    after = 1 if code == NOT_SUPPORTED else 2
    node.fail("nvmlDeviceGetNvLinkState", code, gpu=1, after=after)
    assert open_door(node).scan() == replace(TRIANGLE, links=left)


def test_of_a_switch_that_cannot_be_told_from_a_cpu_nothing_is_claimed(
    tmp_path: Path, open_door: Open
) -> None:
    node = fakenvml.h100x8(tmp_path)
    node.fail("nvmlDeviceGetNvLinkRemoteDeviceType", FUNCTION_NOT_FOUND, gpu=0)
    scan = open_door(node).scan()
    first = scan.gpus[0].id
    assert all(link.nvlinks == (None if link.a == first else 18) for link in scan.links)


@pytest.mark.parametrize(("code", "fault"), [(GPU_IS_LOST, LOST), (RESET_REQUIRED, RESET)])
@pytest.mark.parametrize(
    ("function", "changes", "links"),
    [
        (
            "nvmlDeviceGetMinorNumber",
            {"minor": None, "model": None, "pci_bus_id": None},
            without_nvlinks(1),
        ),
        ("nvmlDeviceGetName", {"model": None, "pci_bus_id": None}, without_nvlinks(1)),
        ("nvmlDeviceGetPciInfo_v3", {"pci_bus_id": None}, without_nvlinks(1)),
        ("nvmlDeviceGetMemoryInfo", {}, TRIANGLE.links),
    ],
)
def test_a_gpu_that_is_lost_while_it_is_asked_keeps_what_it_told_before(
    function: str,
    changes: dict[str, None],
    links: tuple[Link, ...],
    code: int,
    fault: Fault,
    shared: tuple[FakeNode, Door],
) -> None:
    node, door = shared
    node.fail(function, code, gpu=1)
    scan = door.scan()
    lost = with_gpu(1, **changes, memory_bytes=None, mig_enabled=None, fault=fault)
    assert scan == replace(TRIANGLE, gpus=lost, links=links)
    assert door.errors() == (CallError(FUNCTIONS[function], CODES[code]),)


@pytest.mark.parametrize(
    ("function", "code", "fault"),
    [
        ("nvmlDeviceGetHandleByIndex_v2", GPU_IS_LOST, LOST),
        ("nvmlDeviceGetHandleByIndex_v2", RESET_REQUIRED, RESET),
        ("nvmlDeviceGetUUID", RESET_REQUIRED, RESET),
        (
            "nvmlDeviceGetUUID",
            NO_PERMISSION,
            Fault("unreadable", "the driver answers no_permission"),
        ),
    ],
)
def test_a_gpu_that_does_not_say_who_it_is_costs_only_itself(
    function: str, code: int, fault: Fault, node: FakeNode, open_door: Open
) -> None:
    handle = "nvmlDeviceGetHandleByIndex_v2"
    where = {"after": 2, "count": 1} if function == handle else {"gpu": 1}
    node.fail(function, code, **where)
    scan = open_door(node).scan()
    assert scan.gpus == (described(0), described(2))
    assert scan.unreadable == (UnreadableGpu(1, fault),)
    assert scan.links == (TRIANGLE.links[1],)


def test_a_gpu_that_is_lost_before_the_start_leaves_the_others_to_serve(
    tmp_path: Path, open_door: Open
) -> None:
    node = fakenvml.h100x8(tmp_path)
    node.lose(2)
    door = open_door(node)
    scan = door.scan()
    assert [gpu.index for gpu in scan.gpus] == [0, 1, 3, 4, 5, 6, 7]
    assert scan.unreadable == (UnreadableGpu(2, LOST),)
    assert all(link.nvlinks == 18 for link in scan.links)
    assert len(scan.links) == 21
    assert [reading.gpu for reading in door.read()] == gpus_of(scan)
    assert door.errors() == (CallError("nvmlDeviceGetHandleByIndex", "gpu_is_lost"),)


# --- an older library -----------------------------------------------------------------


def build_without(library: Path, function: str) -> Path:
    return fakenvml.build(library.parent.parent, without=frozenset({function}))


@pytest.fixture(scope="module")
def older(fake_library: Path) -> Mapping[str, Path]:
    """A library without it, for each function that the door calls."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = pool.map(lambda function: build_without(fake_library, function), FUNCTIONS)
        return dict(zip(FUNCTIONS, built, strict=True))


def in_all(**changes: Any) -> tuple[DriverGpu, ...]:
    return tuple(replace(gpu, **changes) for gpu in TRIANGLE.gpus)


def nobody(code: str) -> Scan:
    fault = Fault("unreadable", f"the driver answers {code}")
    return Scan(TRIANGLE.driver, (), tuple(UnreadableGpu(n, fault) for n in range(3)))


OLDER: Final[Mapping[str, Scan]] = {
    "nvmlSystemGetDriverVersion": replace(
        TRIANGLE, driver=replace(TRIANGLE.driver, driver_version=None)
    ),
    "nvmlSystemGetNVMLVersion": replace(
        TRIANGLE, driver=replace(TRIANGLE.driver, library_version=None)
    ),
    "nvmlSystemGetCudaDriverVersion_v2": replace(
        TRIANGLE, driver=replace(TRIANGLE.driver, cuda_version=None)
    ),
    "nvmlDeviceGetHandleByIndex_v2": nobody("function_not_found"),
    "nvmlDeviceGetUUID": nobody("function_not_found"),
    "nvmlDeviceGetMinorNumber": replace(TRIANGLE, gpus=in_all(minor=None)),
    "nvmlDeviceGetName": replace(TRIANGLE, gpus=in_all(model=None)),
    "nvmlDeviceGetPciInfo_v3": replace(
        TRIANGLE, gpus=in_all(pci_bus_id=None), links=without_nvlinks(0, 1, 2)
    ),
    "nvmlDeviceGetMemoryInfo": replace(TRIANGLE, gpus=in_all(memory_bytes=None)),
    "nvmlDeviceGetMigMode": replace(TRIANGLE, gpus=in_all(mig_enabled=None)),
    "nvmlDeviceGetTopologyCommonAncestor": replace(
        TRIANGLE, links=tuple(replace(link, pcie=PcieLevel.UNKNOWN) for link in TRIANGLE.links)
    ),
    "nvmlDeviceGetNvLinkState": replace(TRIANGLE, links=without_nvlinks(0, 1, 2)),
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": replace(TRIANGLE, links=without_nvlinks(0, 1, 2)),
    "nvmlDeviceRegisterEvents": replace(TRIANGLE, gpus=in_all(events=False)),
    "nvmlEventSetCreate": replace(TRIANGLE, gpus=in_all(events=False)),
    "nvmlEventSetWait_v2": replace(TRIANGLE, gpus=in_all(events=False)),
}
"""What is told without a function; without those that are not named, everything."""


@pytest.mark.parametrize(
    "function", sorted(FUNCTIONS.keys() - {"nvmlInitWithFlags", "nvmlDeviceGetCount_v2"})
)
def test_a_library_that_lacks_a_function_tells_the_rest(
    function: str, node: FakeNode, older: Mapping[str, Path], open_door: Open
) -> None:
    door = open_door(node, older[function].parent)
    door.scan()
    for _ in range(2):
        assert door.wait(0.001) == ()
    scan = door.scan()
    assert scan == OLDER.get(function, TRIANGLE)
    assert door.read() == tuple(Reading(gpu.id) for gpu in scan.gpus)
    door.close()
    assert door.scan().driver == scan.driver
    assert door.errors() == ()


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_a_library_without_the_most_necessary_cannot_be_used(
    function: str, node: FakeNode, older: Mapping[str, Path], open_door: Open
) -> None:
    door = open_door(node, older[function].parent)
    with pytest.raises(HardwareError, match="failed: function_not_found") as caught:
        door.scan()
    assert caught.value.call == FUNCTIONS[function]
    assert caught.value.driver_code == FUNCTION_NOT_FOUND


# --- readings -------------------------------------------------------------------------


def test_a_lost_gpu_is_read_as_lost_until_the_driver_is_opened_anew(
    node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.scan()
    node.lose(1)
    lost = tuple(
        Reading(gpu.id, LOST if gpu.index == 1 else None, was_reset=False) for gpu in TRIANGLE.gpus
    )
    assert door.read() == lost
    assert door.errors() == (CallError("nvmlDeviceGetMemoryInfo", "gpu_is_lost"),)
    node.restore(1)
    assert door.read() == lost
    door.close()
    assert door.scan() == TRIANGLE
    assert door.read() == tuple(Reading(gpu.id) for gpu in TRIANGLE.gpus)


def test_a_gpu_that_wants_a_reset_is_read_so(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    door.scan()
    node.fail("nvmlDeviceGetMemoryInfo", RESET_REQUIRED, gpu=0)
    assert [reading.fault for reading in door.read()] == [RESET, None, None]
    node.clear_faults()
    assert [reading.fault for reading in door.read()] == [None] * 3


def test_a_gpu_that_has_no_memory_to_tell_of_is_asked_for_its_temperature(
    node: FakeNode, open_door: Open
) -> None:
    node.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    door = open_door(node)
    door.scan()
    assert [reading.fault for reading in door.read()] == [None] * 3
    node.lose(2)
    node.clear_faults()
    node.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    assert [reading.fault for reading in door.read()] == [None, None, LOST]


def test_a_gpu_that_was_taken_out_is_lost_and_then_not_listed(
    node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.scan()
    node.remove(0)
    assert [reading.fault for reading in door.read()] == [LOST, None, None]
    door.close()
    assert gpus_of(door.scan()) == ["GPU-1", "GPU-2"]


# --- events ---------------------------------------------------------------------------


def test_an_xid_error_is_told_with_its_gpu_and_its_slice(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    door.scan()
    node.xid(1, 79)
    node.xid(2, 94, gi=1, ci=0)
    node.xid(0, 31, gi=0)
    node.xid(None, 119)
    assert door.wait(10) == (
        XidEvent(GpuId("GPU-1"), 79),
        XidEvent(GpuId("GPU-2"), 94, gpu_instance=1, compute_instance=0),
        XidEvent(GpuId("GPU-0"), 31, gpu_instance=0),
        XidEvent(None, 119),
    )
    assert door.wait(0.001) == ()
    assert door.errors() == ()


def test_a_storm_arrives_whole_in_order_and_in_pieces(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    door.scan()
    for number in range(200):
        node.xid(number % 3, number)
    pieces = [door.wait(10) for _ in range(4)]
    assert [len(piece) for piece in pieces] == [64, 64, 64, 8]
    assert [event for piece in pieces for event in piece] == [
        XidEvent(GpuId(f"GPU-{number % 3}"), number) for number in range(200)
    ]


def test_a_storm_of_other_events_does_not_keep_a_wait_from_ending(
    node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.scan()
    for number in range(100):
        node.event(0, 8 | 2, number)  # for whom Xid errors are wanted, but none
    node.event(0, 2, 1)
    node.xid(0, 48)
    assert door.wait(10) == ()
    assert door.wait(10) == (XidEvent(GpuId("GPU-0"), 48),)


@pytest.mark.parametrize("events", ["none", 0x12])
def test_a_gpu_that_reports_no_xid_errors_does_not_keep_the_others_from_it(
    events: Any, node: FakeNode, open_door: Open
) -> None:
    node.put(1, FakeGpu("GPU-1", "00000000:02:00.0", events=events))
    door = open_door(node)
    assert [gpu.events for gpu in door.scan().gpus] == [True, False, True]
    node.xid(1, 13)
    node.xid(2, 31)
    assert door.wait(10) == (XidEvent(GpuId("GPU-2"), 31),)


def test_where_no_gpu_reports_events_the_driver_is_not_asked_to_wait(
    tmp_path: Path, open_door: Open
) -> None:
    node = FakeNode(tmp_path, [FakeGpu("GPU-0", "00000000:01:00.0", events="none")])
    door = open_door(node)
    door.scan()
    assert door.wait(0.001) == ()
    assert "nvmlEventSetWait_v2" not in node.calls()


def test_a_wait_in_which_nothing_happens_ends(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    door.scan()
    for timeout_s in (0, 0.01):
        assert door.wait(timeout_s) == ()
    assert node.calls().count("nvmlEventSetWait_v2") == 2


@pytest.mark.parametrize("code", [GPU_IS_LOST, RESET_REQUIRED])
def test_a_lost_gpu_ends_a_wait_early_once_and_then_not_again_and_again(
    code: int, node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.scan()
    node.fail("nvmlEventSetWait_v2", code)
    assert door.wait(3600) == ()
    for _ in range(5):
        assert door.wait(0.01) == ()
    assert node.calls().count("nvmlEventSetWait_v2") == 6
    assert door.errors() == (CallError("nvmlEventSetWait_v2", CODES[code]),) * 6
    node.clear_faults()
    assert door.wait(0.001) == ()
    node.fail("nvmlEventSetWait_v2", code)
    assert door.wait(3600) == ()


def test_events_that_came_before_a_failure_are_handed_on(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    door.scan()
    node.xid(0, 79)
    node.xid(1, 79)
    node.fail("nvmlEventSetWait_v2", UNKNOWN, after=3)
    assert door.wait(10) == (XidEvent(GpuId("GPU-0"), 79), XidEvent(GpuId("GPU-1"), 79))
    with pytest.raises(HardwareError, match=r"nvmlEventSetWait_v2 failed: unknown \(999\)"):
        door.wait(10)
    assert door.errors() == (CallError("nvmlEventSetWait_v2", "unknown"),) * 2


@pytest.mark.parametrize("code", [GPU_IS_LOST, UNINITIALIZED])
def test_an_event_of_a_gpu_that_does_not_say_who_it_is_is_handed_on_without(
    code: int, node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.scan()
    node.fail("nvmlDeviceGetUUID", UNKNOWN, gpu=1)
    assert gpus_of(door.scan()) == ["GPU-0", "GPU-2"]
    node.xid(1, 79)
    node.clear_faults()
    assert door.wait(10) == (XidEvent(None, 79),)
    node.fail("nvmlDeviceGetUUID", code)
    node.xid(1, 79)
    assert door.wait(10) == (XidEvent(None, 79),)


def test_a_second_look_hears_each_event_once(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    assert door.scan() == door.scan() == TRIANGLE
    node.xid(1, 43)
    assert door.wait(10) == (XidEvent(GpuId("GPU-1"), 43),)
    assert door.wait(0.001) == ()
    registered = [call for call in node.calls() if call.startswith("nvmlDeviceRegisterEvents")]
    assert registered == [f"nvmlDeviceRegisterEvents {n}" for n in range(3)]
    assert node.calls().count("nvmlInitWithFlags") == 1


def test_events_that_could_not_be_had_are_tried_for_at_the_next_scan(
    node: FakeNode, open_door: Open
) -> None:
    node.fail("nvmlEventSetCreate", UNKNOWN, count=1)
    node.fail("nvmlDeviceRegisterEvents", UNKNOWN, gpu=1, count=1)
    door = open_door(node)
    assert [[gpu.events for gpu in door.scan().gpus] for _ in range(3)] == [
        [False, False, False],
        [True, False, True],
        [True, True, True],
    ]
    node.xid(1, 63)
    assert door.wait(10) == (XidEvent(GpuId("GPU-1"), 63),)


def test_where_waiting_is_not_supported_the_gpus_are_said_to_have_no_events(
    node: FakeNode, open_door: Open
) -> None:
    node.fail("nvmlEventSetWait_v2", NOT_SUPPORTED)
    door = open_door(node)
    door.scan()
    for _ in range(3):
        assert door.wait(0.001) == ()
    assert node.calls().count("nvmlEventSetWait_v2") == 1
    assert door.scan() == OLDER["nvmlEventSetWait_v2"]
    assert door.errors() == ()


# --- the session ----------------------------------------------------------------------


def test_a_door_may_be_closed_before_it_was_opened_and_twice(
    node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.close()
    assert node.calls() == []
    door.scan()
    door.close()
    node.forget_calls()
    door.close()
    assert door.read() == ()
    assert door.wait(0.001) == ()
    assert door.errors() == ()
    assert node.calls() == [], "a door that is closed leaves the driver alone"
    assert door.scan() == TRIANGLE


def test_what_is_opened_is_given_back(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    for _ in range(3):
        door.scan()
        door.close()
    calls = node.calls()
    assert [
        calls.count(function)
        for function in (
            *("nvmlInitWithFlags", "nvmlShutdown"),
            *("nvmlEventSetCreate", "nvmlEventSetFree"),
        )
    ] == [3] * 4


def test_what_is_to_be_left_alone_is_not_touched(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    whole = door.scan()
    assert door.close()
    node.forget_calls()
    only = tuple(Address(gpu.index, str(gpu.pci_bus_id)) for gpu in whole.gpus if gpu.index != 1)
    scan = door.scan(only)
    assert scan.gpus == (whole.gpus[0], whole.gpus[2])
    assert scan.links == (link(0, 2, PcieLevel.PHB, 1),)
    assert [reading.gpu for reading in door.read()] == [gpu.id for gpu in scan.gpus]
    node.xid(2, 79)
    assert door.wait(10) == (XidEvent(whole.gpus[2].id, 79),)
    assert not [call for call in node.calls() if call.endswith(" 1")]
    assert door.close()


def test_a_gpu_that_is_not_where_it_was_is_not_listed(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    gone = Address(1, "0000:99:00.0")
    assert door.scan((gone,)) == replace(TRIANGLE, gpus=(), links=())
    assert door.errors() == ()


def test_a_session_that_cannot_be_ended_is_used_again_and_ended_later(
    node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.scan()
    node.fail("nvmlShutdown", UNKNOWN, count=1)
    assert not door.close(), "and it is said"
    assert door.errors() == (CallError("nvmlShutdown", "unknown"),)
    assert door.scan() == TRIANGLE
    node.xid(1, 45)
    assert door.wait(10) == (XidEvent(GpuId("GPU-1"), 45),)
    assert node.calls().count("nvmlInitWithFlags") == 1
    node.lose(2)
    door.read()
    node.restore(2)
    door.close()
    assert door.scan() == TRIANGLE, "this time it was ended: the loss is forgotten"


def test_a_driver_that_is_gone_in_the_middle_is_closed_and_found_again(
    node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.scan()
    node.fail("nvmlDeviceGetMemoryInfo", DRIVER_NOT_LOADED, gpu=1)
    with pytest.raises(DriverMissing) as caught:
        door.read()
    assert (caught.value.call, caught.value.driver_code) == ("nvmlDeviceGetMemoryInfo", 9)
    door.close()
    node.clear_faults()
    assert door.scan() == TRIANGLE


def test_errors_that_nobody_asks_for_do_not_pile_up(node: FakeNode, open_door: Open) -> None:
    door = open_door(node)
    door.scan()
    node.fail("nvmlDeviceGetMemoryInfo", UNKNOWN)
    for _ in range(350):
        door.read()
    assert door.errors() == (CallError("nvmlDeviceGetMemoryInfo", "unknown"),) * 1000
    assert door.errors() == ()


# --- other events ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code"), [(0x2000, "fatal-poison"), (0x4000, "unavailable"), (0x8000, None)]
)
def test_events_that_concern_the_health_of_a_gpu_are_told(
    kind: int, code: str | None, node: FakeNode, open_door: Open
) -> None:
    door = open_door(node)
    door.scan()
    node.event(1, 0x4)  # a change of the performance state
    node.event(1, kind)
    (alarm,) = door.wait(5)
    assert isinstance(alarm, Alarm)
    assert alarm.gpu == GpuId("GPU-1")
    assert (alarm.fault.code if alarm.fault is not None else None) == code


def test_only_events_that_a_gpu_can_report_are_asked_for(tmp_path: Path, open_door: Open) -> None:
    node = FakeNode(tmp_path, [FakeGpu("GPU-0", "00000000:01:00.0", events=0x2008)])
    door = open_door(node)
    assert door.scan().gpus[0].events
    node.event(0, 0x4000)
    node.event(0, 0x2000)
    assert [event.fault.code for event in door.wait(5) if isinstance(event, Alarm) and event.fault]


# --- the condition of a GPU ------------------------------------------------------------------


def conditions(open_door: Open, directory: Path, **facts: Any) -> Reading:
    """What is read of a GPU of which the driver tells this."""
    door = open_door(FakeNode(directory, [FakeGpu("GPU-0", "00000000:01:00.0", **facts)]))
    door.scan()
    (reading,) = door.read()
    assert door.errors() == ()
    return reading


@pytest.mark.parametrize(("number", "action"), list(enumerate(RecoveryAction)))
def test_the_recovery_action_is_told(
    number: int, action: RecoveryAction, open_door: Open, tmp_path: Path
) -> None:
    assert conditions(open_door, tmp_path, action=number) == Reading(GpuId("GPU-0"), action=action)


def test_a_recovery_action_of_a_newer_driver_is_not_guessed(
    open_door: Open, tmp_path: Path
) -> None:
    assert conditions(open_door, tmp_path, action=99).action is None


@pytest.mark.parametrize(
    ("remap", "told"),
    [
        ("none", RowRemap(pending=False, failed=False)),
        ("pending", RowRemap(pending=True, failed=False)),
        ("failed", RowRemap(pending=False, failed=True)),
    ],
)
def test_remapped_rows_are_told(
    remap: str, told: RowRemap, open_door: Open, tmp_path: Path
) -> None:
    assert conditions(open_door, tmp_path, remap=remap).remap == told


@pytest.mark.parametrize(
    ("state", "fabric"),
    [
        ("0", None),
        ("1", Fabric.NOT_STARTED),
        ("2", Fabric.IN_PROGRESS),
        ("3", Fabric.COMPLETED),
        ("3/999", Fabric.FAILED),
        ("7", None),
    ],
)
def test_the_fabrics_state_is_told(
    state: str, fabric: Fabric | None, open_door: Open, tmp_path: Path
) -> None:
    assert conditions(open_door, tmp_path, fabric=state).fabric is fabric


def test_why_clocks_are_low_is_told(open_door: Open, tmp_path: Path) -> None:
    idle, hot = 0x1, 0x20 | 0x40
    assert conditions(open_door, tmp_path / "a", throttle=idle).throttled_by == ()
    found = conditions(open_door, tmp_path / "b", throttle=idle | hot).throttled_by
    assert found == ("temperature", "temperature, by hardware")


def test_what_a_card_does_not_have_is_none(open_door: Open, tmp_path: Path) -> None:
    assert conditions(open_door, tmp_path) == Reading(GpuId("GPU-0"))


def test_error_counts_that_start_again_are_a_sign_of_a_reset(
    open_door: Open, tmp_path: Path
) -> None:
    node = FakeNode(tmp_path, [FakeGpu("GPU-0", "00000000:01:00.0", errors=2)])
    door = open_door(node)
    door.scan()
    seen = []
    for errors in (2, 3, 3, 0, 0):
        node.change(0, errors=errors)
        (reading,) = door.read()
        seen.append((reading.uncorrected_errors, reading.was_reset))
    assert seen == [(2, False), (3, False), (3, False), (0, True), (0, False)]


def test_a_gpu_that_is_lost_while_its_condition_is_read_is_lost(
    open_door: Open, tmp_path: Path
) -> None:
    node = FakeNode(tmp_path, [FakeGpu("GPU-0", "00000000:01:00.0", remap="none")])
    node.fail("nvmlDeviceGetRemappedRows", GPU_IS_LOST)
    door = open_door(node)
    door.scan()
    assert door.read() == (Reading(GpuId("GPU-0"), LOST),)
