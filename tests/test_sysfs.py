"""deviceplugin.hardware.sysfs, on trees of files"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.hardware.sysfs import CONTROL_NODES, HostFiles
from deviceplugin.model import DriverGpu, DriverInfo, HostFacts, NumaPlace, NumaSource, Scan
from tests.builders import driver_gpu, gpu_id
from tests.fakenvml import write_dev, write_sysfs

BUS = "0000:c3:00.0"
CPUS = {0: "0-15,32-47", 1: "16-31"}

NOT_TOLD = NumaPlace(None, NumaSource.NOT_TOLD)
NO_CPUS = NumaPlace(None, NumaSource.NO_CPUS)
UNREADABLE = NumaPlace(None, NumaSource.UNREADABLE)
NO_BUS_ID = NumaPlace(None, NumaSource.NO_BUS_ID)


def own(node: int) -> NumaPlace:
    return NumaPlace(node, NumaSource.DEVICE)


def inherited(node: int) -> NumaPlace:
    return NumaPlace(node, NumaSource.PARENT)


def on_bus(bus: str | None, number: int = 0) -> DriverGpu:
    return replace(driver_gpu(number), pci_bus_id=bus)


def facts(root: Path, *gpus: DriverGpu) -> HostFacts:
    host = HostFiles(root / "sys", root / "dev", root / "proc")
    return host.facts(Scan(DriverInfo(), gpus))


def numa(root: Path, bus: str | None = BUS) -> NumaPlace:
    """The place of a GPU on this bus."""
    return facts(root, on_bus(bus)).numa[gpu_id(0)]


def device(root: Path, bus: str = BUS) -> Path:
    """The directory of a device that ``write_sysfs`` made."""
    return (root / "sys/bus/pci/devices" / bus).resolve(strict=True)


def write_information(root: Path, content: bytes, bus: str = BUS) -> None:
    path = root / "proc/driver/nvidia/gpus" / bus / "information"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# --- NUMA nodes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "bridge", "place"),
    [
        (0, 0, own(0)),
        (1, 0, own(1)),
        (-1, 1, inherited(1)),
        (None, 1, inherited(1)),
        (-1, -1, NOT_TOLD),
        (-1, None, NOT_TOLD),
        (None, -1, UNREADABLE),
        (None, None, UNREADABLE),
        (7, 1, inherited(1)),
        (7, -1, NO_CPUS),
        (7, 7, NO_CPUS),
        (-1, 7, NO_CPUS),
    ],
)
def test_the_nearest_that_names_a_node_with_cpus_decides(
    told: int | None, bridge: int | None, place: NumaPlace, tmp_path: Path
) -> None:
    write_sysfs(tmp_path / "sys", {BUS: told}, {**CPUS, 7: ""}, {BUS: bridge})
    assert numa(tmp_path) == place


def test_parents_are_asked_up_to_the_root_of_the_devices(tmp_path: Path) -> None:
    write_sysfs(tmp_path / "sys", {BUS: -1}, CPUS)
    link = tmp_path / "sys/bus/pci/devices" / BUS
    link.unlink()
    root_port = tmp_path / "sys/devices/pci0000:c0"
    deep = root_port / "0000:c0:01.0/0000:c1:00.0/0000:c2:04.0" / BUS
    deep.mkdir(parents=True)
    link.symlink_to(deep)
    for directory in (deep, *deep.parents[:3]):
        (directory / "numa_node").write_text("-1\n")
    (tmp_path / "sys/devices/numa_node").write_text("0\n")
    (tmp_path / "sys/numa_node").write_text("0\n")
    assert numa(tmp_path) == NOT_TOLD
    (root_port / "numa_node").write_text("1\n")
    assert numa(tmp_path) == inherited(1)
    (deep.parent / "numa_node").write_text("0\n")
    assert numa(tmp_path) == inherited(0)


def test_each_gpu_has_a_place_of_its_own(tmp_path: Path) -> None:
    buses = {"0000:1b:00.0": 0, "0000:c3:00.0": -1, "10000:e1:00.0": 1}
    write_sysfs(tmp_path / "sys", buses, CPUS)
    gpus = [on_bus(bus, number) for number, bus in enumerate(buses)]
    assert facts(tmp_path, *gpus).numa == {
        gpu_id(0): own(0),
        gpu_id(1): NOT_TOLD,
        gpu_id(2): own(1),
    }


def test_a_host_that_tells_nothing_of_nodes_gives_no_hints(tmp_path: Path) -> None:
    write_sysfs(tmp_path / "sys", {BUS: 0}, {})
    assert numa(tmp_path) == NO_CPUS
    for path in (tmp_path / "sys/devices/system/node").iterdir():
        path.unlink()
    (tmp_path / "sys/devices/system/node").rmdir()
    assert numa(tmp_path) == NO_CPUS


def test_without_any_files_everything_is_simply_unknown(tmp_path: Path) -> None:
    gpu = replace(on_bus(BUS), minor=None)
    assert facts(tmp_path / "nowhere", gpu) == HostFacts({gpu.id: UNREADABLE}, {}, {}, ())
    assert facts(tmp_path / "nowhere") == HostFacts({}, {}, {}, ())


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\n",
        b"x",
        b"1 2",
        b"1\n0\n",
        b"0x1",
        b"+1",
        b"1.0",
        b"--1",
        b"1234567",
        b"1" * 10240,
        b"\x00\xff\xfe1",
        "١".encode(),
    ],
)
def test_garbage_for_a_number_costs_only_the_gpu_that_it_is_about(
    garbage: bytes, tmp_path: Path
) -> None:
    other = "0000:1b:00.0"
    write_sysfs(tmp_path / "sys", {BUS: 1, other: 0}, CPUS, {BUS: -1})
    (device(tmp_path) / "numa_node").write_bytes(garbage)
    told = facts(tmp_path, on_bus(BUS, 0), on_bus(other, 1)).numa
    assert told == {gpu_id(0): UNREADABLE, gpu_id(1): own(0)}
    (device(tmp_path).parent / "numa_node").write_text("0\n")
    assert numa(tmp_path) == inherited(0)


def as_directory(path: Path) -> None:
    path.mkdir()


def as_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def as_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def as_what_can_be_opened_but_not_read(path: Path) -> None:
    path.symlink_to("/proc/self/mem")


Spoil = Callable[[Path], None]
SPOILERS = [
    as_directory,
    as_dangling_link,
    as_link_to_itself,
    as_what_can_be_opened_but_not_read,
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_file_that_cannot_be_read_costs_the_one_fact(spoil: Spoil, tmp_path: Path) -> None:
    write_sysfs(tmp_path / "sys", {BUS: 1}, CPUS, {BUS: -1})
    write_information(tmp_path, b"Device Minor: 3\n")
    gpu = replace(on_bus(BUS), minor=None)
    information = tmp_path / "proc/driver/nvidia/gpus" / BUS / "information"
    cpus = tmp_path / "sys/devices/system/node/node1/cpulist"
    assert facts(tmp_path, gpu).minors == {gpu.id: 3}
    for path, place in (
        (information, own(1)),
        (cpus, NO_CPUS),
        (device(tmp_path) / "numa_node", UNREADABLE),
    ):
        path.unlink()
        spoil(path)
        assert facts(tmp_path, gpu) == HostFacts({gpu.id: place})


@pytest.mark.parametrize("spoil", SPOILERS[1:3])
def test_a_device_whose_link_leads_nowhere_is_unreadable(spoil: Spoil, tmp_path: Path) -> None:
    write_sysfs(tmp_path / "sys", {BUS: 1}, CPUS)
    link = tmp_path / "sys/bus/pci/devices" / BUS
    link.unlink()
    assert numa(tmp_path) == UNREADABLE
    spoil(link)
    assert numa(tmp_path) == UNREADABLE


@pytest.mark.parametrize("outside", ["elsewhere", "sys/other", "sys/devices-2/device"])
def test_a_device_outside_of_the_tree_is_not_looked_at(outside: str, tmp_path: Path) -> None:
    write_sysfs(tmp_path / "sys", {BUS: 1}, CPUS)
    (tmp_path / outside).mkdir(parents=True, exist_ok=True)
    (tmp_path / outside / "numa_node").write_text("1\n")
    link = tmp_path / "sys/bus/pci/devices" / BUS
    link.unlink()
    link.symlink_to(tmp_path / outside)
    assert numa(tmp_path) == UNREADABLE


def test_a_tree_may_itself_be_reached_by_a_link(tmp_path: Path) -> None:
    write_sysfs(tmp_path / "mounted/sys", {BUS: 1}, CPUS)
    (tmp_path / "sys").symlink_to(tmp_path / "mounted/sys")
    assert numa(tmp_path) == own(1)


@pytest.mark.parametrize(
    "bus",
    [
        None,
        "",
        "../../etc",
        "..",
        "/etc",
        "0000:c3:00.0/../0000:1b:00.0",
        "0000:c3:00.0\n",
        "0000:c3:00.8",
        "c3:00.0",
        "00000000:C3:00.0",
        "0000:C3:00.0",
    ],
)
def test_what_is_not_a_bus_id_as_sysfs_writes_it_is_never_made_part_of_a_path(
    bus: str | None, tmp_path: Path
) -> None:
    write_sysfs(tmp_path / "sys", {BUS: 1, "0000:1b:00.0": 1}, CPUS)
    place = tmp_path / "sys/bus/pci/devices"
    for path in (place, place.parent, place.parent.parent):
        (path / "numa_node").write_text("1\n")
    for path in (tmp_path / "proc/driver/nvidia/gpus", tmp_path / "proc/driver/nvidia"):
        path.mkdir(parents=True, exist_ok=True)
        (path / "information").write_text("Device Minor: 1\n")
    told = facts(tmp_path, replace(on_bus(bus), minor=None))
    assert told == HostFacts({gpu_id(0): NO_BUS_ID}, {}, {}, ())


# --- minor numbers and device nodes ---------------------------------------------------


INFORMATION = (
    b"Model: \t\t NVIDIA H100 80GB HBM3\n"
    b"IRQ:   \t\t 18\n"
    b"Bus Location: \t 0000:c3:00.0\n"
    b"Device Minor: \t 5\n"
    b"GPU Excluded:\t No\n"
)


def test_a_minor_number_that_the_driver_did_not_tell_is_in_its_files(tmp_path: Path) -> None:
    write_information(tmp_path, INFORMATION)
    write_dev(tmp_path / "dev", [5])
    told = facts(tmp_path, replace(on_bus(BUS), minor=None))
    assert told.minors == {gpu_id(0): 5}
    assert told.nodes == {gpu_id(0): ("/dev/nvidia5",)}


def test_a_minor_number_that_the_driver_told_is_not_looked_for(tmp_path: Path) -> None:
    write_information(tmp_path, INFORMATION)
    write_dev(tmp_path / "dev", [5, 8])
    told = facts(tmp_path, replace(on_bus(BUS), minor=8))
    assert told.minors == {}
    assert told.nodes == {gpu_id(0): ("/dev/nvidia8",)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"Device Minor:\n",
        b"Device Minor:\n5\n",
        b"Device Minor: five\n",
        b"Device Minor: -1\n",
        b"Device Minor: 5 6\n",
        b"Device Minor: 1234567\n",
        b"Other Device Minor: 5\n",
        b"\xff" * 10240,
    ],
)
def test_a_minor_number_that_is_not_told_is_not_known(content: bytes, tmp_path: Path) -> None:
    write_information(tmp_path, content)
    write_dev(tmp_path / "dev", [0, 5])
    told = facts(tmp_path, replace(on_bus(BUS), minor=None))
    assert (told.minors, told.nodes) == ({}, {})


def test_only_character_devices_are_handed_out(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    write_dev(dev, [0])
    (dev / "nvidia1").write_text("a plain file")
    (dev / "nvidia2").mkdir()
    (dev / "nvidia3").symlink_to(dev / "nothing")
    (dev / "nvidia4").symlink_to("nvidia4")
    (dev / "nvidia-uvm-tools").write_text("a plain file")
    (dev / "nvidia-modeset").symlink_to(dev / "nothing")
    told = facts(tmp_path, *(replace(driver_gpu(number), minor=number) for number in range(6)))
    assert told.nodes == {gpu_id(0): ("/dev/nvidia0",)}
    assert told.control_nodes == ("/dev/nvidiactl", "/dev/nvidia-uvm")


def test_control_nodes_come_in_their_order_and_as_the_host_names_them(tmp_path: Path) -> None:
    dev = tmp_path / "host/dev"
    write_dev(dev, [])
    for name in ("nvidia-modeset", "nvidia-uvm-tools", "nvidia-caps"):
        (dev / name).symlink_to("/dev/null")
    told = HostFiles(dev_root=dev).facts(Scan(DriverInfo(), ()))
    assert told.control_nodes == (
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-modeset",
    )
    assert told.control_nodes == tuple(f"/dev/{name}" for name in CONTROL_NODES)


# --- whatever the files hold ----------------------------------------------------------


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_sysfs(root / "sys", {BUS: 0}, CPUS, {BUS: -1})
        yield root


SOME_BYTES = st.one_of(
    st.binary(max_size=64),
    st.text("-0123456789 \t\n\x00x", max_size=8).map(str.encode),
    st.integers(-10, 10**7).map(lambda number: f"{number}\n".encode()),
)


@given(SOME_BYTES)
def test_whatever_a_numa_node_file_holds_gives_a_known_node_or_none(
    tree: Path, content: bytes
) -> None:
    (device(tree) / "numa_node").write_bytes(content)
    place = numa(tree)
    assert place in (own(0), own(1), NOT_TOLD, NO_CPUS, UNREADABLE)
    if place.node is not None:
        assert int(content) == place.node


@given(SOME_BYTES)
def test_whatever_a_list_of_cpus_holds_gives_the_node_or_none(tree: Path, content: bytes) -> None:
    (device(tree) / "numa_node").write_bytes(b"0\n")
    cpus = tree / "sys/devices/system/node/node0/cpulist"
    cpus.write_bytes(content)
    has_cpus = any(byte in b"0123456789" for byte in content)
    assert numa(tree) == (own(0) if has_cpus else NO_CPUS)


@given(st.one_of(SOME_BYTES, SOME_BYTES.map(b"Device Minor: ".__add__)))
def test_whatever_an_information_file_holds_gives_a_minor_number_or_none(
    tree: Path, content: bytes
) -> None:
    write_information(tree, content)
    minors = facts(tree, replace(on_bus(BUS), minor=None)).minors
    assert minors.keys() <= {gpu_id(0)}
    assert all(0 <= minor < 10**6 for minor in minors.values())


def test_a_driver_that_is_bound_anew_has_another_number(tmp_path: Path) -> None:
    write_sysfs(tmp_path / "sys", {BUS: 1}, CPUS)
    assert facts(tmp_path, on_bus(BUS)).bindings == {}
    link = device(tmp_path) / "driver"
    link.symlink_to("../../bus/pci/drivers/nvidia")
    before = facts(tmp_path, on_bus(BUS)).bindings
    assert before == facts(tmp_path, on_bus(BUS)).bindings
    assert before.keys() == {gpu_id(0)}
    (device(tmp_path) / "other").symlink_to("x")  # the old number may be given away again
    link.rename(device(tmp_path) / "was")
    link.symlink_to("../../bus/pci/drivers/nvidia")
    assert facts(tmp_path, on_bus(BUS)).bindings != before
