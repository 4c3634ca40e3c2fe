"""deviceplugin.memory"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import inventory
from deviceplugin.memory import Memory, Remembered
from deviceplugin.model import DriverInfo, Gpu, HostFacts, Maintenance, NumaPlace, NumaSource, Scan
from deviceplugin.statefile import Recall
from deviceplugin.stats import Stats
from tests.builders import SetClock, driver_gpu, gpu_id

STEM = "vendor.example_gpu"


def gpus(count: int) -> tuple[Gpu, ...]:
    scan = Scan(DriverInfo(), tuple(driver_gpu(number) for number in range(count)))
    facts = HostFacts({gpu_id(0): NumaPlace(1, NumaSource.DEVICE)})
    return inventory.merge(None, scan, facts, 0.0).gpus


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / f"state/inventory.{STEM}.json"


def fresh(file: Path, stats: Stats | None = None, clock: SetClock | None = None) -> Memory:
    return Memory(file.parent, STEM, stats or Stats(), clock or SetClock())


def test_what_is_saved_is_recalled_by_the_next_process(file: Path) -> None:
    fresh(file).save(gpus(3))
    assert fresh(file).recall() == Remembered(Recall.GOOD, gpus(3))
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no scraps"


def test_without_a_file_there_is_nothing(file: Path) -> None:
    assert fresh(file).recall() == Remembered(Recall.NOTHING)


def test_nothing_is_written_when_nothing_differs(file: Path) -> None:
    store = fresh(file)
    store.save(gpus(2))
    before = file.stat().st_mtime_ns
    store.save(gpus(2))
    again = fresh(file)
    again.recall()
    again.save(gpus(2))
    assert file.stat().st_mtime_ns == before
    again.save(gpus(1))
    assert fresh(file).recall().gpus == gpus(1)


@pytest.mark.parametrize("damage", ["", "half", "changed", "[]", '{"version": "1"}', "\x00"])
def test_a_damaged_file_is_kept_aside(file: Path, damage: str) -> None:
    fresh(file).save(gpus(2))
    good = file.read_text()
    bad = {"half": good[: len(good) // 2], "changed": good.replace("NVIDIA L4", "NVIDIA L5")}
    file.write_text(bad.get(damage, damage))
    content = file.read_bytes()
    assert fresh(file).recall() == Remembered(Recall.LOST)
    assert not file.exists()
    assert file.with_suffix(".damaged").read_bytes() == content
    fresh(file).save(gpus(2))
    assert fresh(file).recall().how is Recall.GOOD


def test_a_file_of_a_newer_release_is_kept_aside(file: Path) -> None:
    fresh(file).save(gpus(2))
    content = json.loads(file.read_text()) | {"version": 99}
    file.write_text(json.dumps(content))
    assert fresh(file).recall() == Remembered(Recall.LOST)
    assert json.loads(file.with_suffix(".newer").read_text())["version"] == 99


def test_a_file_that_cannot_be_read_is_not_nothing(file: Path) -> None:
    file.mkdir(parents=True)
    assert fresh(file).recall() == Remembered(Recall.LOST)


def test_a_folder_that_cannot_be_written_is_a_metric_and_no_error(file: Path) -> None:
    stats = Stats()
    store = fresh(file, stats)
    file.parent.write_text("in the way")
    store.save(gpus(1))
    assert stats.gauges("state_write_failed") == {(file.name,): 1}
    file.parent.unlink()
    store.save(gpus(1))
    assert stats.gauges("state_write_failed") == {(file.name,): 0}
    assert fresh(file).recall().gpus == gpus(1)


def since(file: Path, clock: SetClock) -> tuple[float | None, float]:
    """Since when the first GPU is gone and the second in maintenance."""
    first, second = fresh(file, clock=clock).recall().gpus
    assert second.maintenance is not None
    return first.gone_since_s, second.maintenance.since_s


def test_times_are_those_of_the_boot_whatever_happens_to_the_wall_clock(file: Path) -> None:
    first, second = gpus(2)
    gone = replace(first, gone_since_s=40.0)
    withdrawn = replace(second, maintenance=Maintenance("reset", 60.0))
    clock = SetClock()  # 100 s after the boot, at 1,000,000 s since the epoch
    fresh(file, clock=clock).save((gone, withdrawn))
    clock.time_s -= 500_000
    clock.boottime_s += 5
    assert since(file, clock) == (40.0, 60.0), "the wall clock was set back"
    clock.boot, clock.time_s, clock.boottime_s = "boot-2", 1_000_300.0, 20.0
    assert since(file, clock) == (-340.0, -320.0), "a reboot: as long ago as the wall clock says"
    clock.boot = ""
    assert since(file, clock) == (-340.0, -320.0), "a boot that cannot be told is another one"


def test_after_a_reboot_the_times_are_written_anew(file: Path) -> None:
    (gpu,) = gpus(1)
    clock = SetClock()
    fresh(file, clock=clock).save((replace(gpu, gone_since_s=40.0),))
    clock.boot, clock.time_s, clock.boottime_s = "boot-2", 1_000_300.0, 20.0
    memory = fresh(file, clock=clock)
    memory.save(memory.recall().gpus)
    clock.time_s += 86_400  # the next process of this boot must not move them again
    assert fresh(file, clock=clock).recall().gpus[0].gone_since_s == -340.0


@given(data=st.binary(max_size=200))
def test_any_bytes_are_recalled_or_lost(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("m")
    (folder / f"inventory.{STEM}.json").write_bytes(data)
    assert Memory(folder, STEM, Stats(), SetClock()).recall().how is Recall.LOST
