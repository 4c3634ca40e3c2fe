"""deviceplugin.casebook"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deviceplugin import health
from deviceplugin.casebook import ENTRIES_PER_GPU, Casebook, Entry, of_gpus
from deviceplugin.health import Policy, Record, on_reading, on_xid
from deviceplugin.model import GpuId, Reading
from deviceplugin.stats import Stats
from tests.builders import SetClock, gpu_id

STEM = "vendor.example_gpu"
POLICY = Policy()
GPU = gpu_id(0)


def book(folder: Path, clock: SetClock | None = None) -> Casebook:
    return Casebook(folder, STEM, Stats(), clock or SetClock())


def records() -> dict[GpuId, Record]:
    """One sick, one recovering, one that an operator has withdrawn."""
    sick = on_xid(health.new(1.0), 79, 40.0, POLICY)
    other = gpu_id(1)
    recovering = on_xid(health.new(1.0), 48, 40.0, POLICY)
    recovering = on_reading(recovering, Reading(other, was_reset=True), 50.0, POLICY)
    word = health.on_word(health.new(1.0), False, "smells", 60.0, until_s=500.0)
    return {GPU: sick, other: recovering, gpu_id(2): word}


def lasting(of: dict[GpuId, Record]) -> dict[GpuId, Record]:
    return {gpu: replace(record, last_xid=None) for gpu, record in of.items()}


def test_what_is_saved_is_recalled_by_the_next_process_of_the_same_boot(tmp_path: Path) -> None:
    book(tmp_path).save(records())
    assert book(tmp_path).recall() == lasting(records())


def test_after_a_reboot_only_the_operators_word_is_left(tmp_path: Path) -> None:
    clock = SetClock()  # 100 s after the boot, at 1,000,000 s since the epoch
    book(tmp_path, clock).save(records())
    clock.boot, clock.time_s, clock.boottime_s = "boot-2", 1_000_300.0, 20.0
    found = book(tmp_path, clock).recall()
    assert found[GPU] == found[gpu_id(1)] == health.new(20.0)
    (case,) = found[gpu_id(2)].cases
    assert (case.detail, case.since_s, case.until_s) == ("smells", -320.0, 120.0)


def test_nothing_is_written_for_an_xid_that_changes_nothing(tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.save({GPU: health.new(1.0)})
    before = (tmp_path / f"health.{STEM}.json").stat().st_mtime_ns
    assert kept.save({GPU: on_xid(health.new(1.0), 13, 5.0, POLICY)})
    assert (tmp_path / f"health.{STEM}.json").stat().st_mtime_ns == before


def test_the_ledger_is_kept_over_boots_and_bounded_for_each_gpu(tmp_path: Path) -> None:
    clock = SetClock()
    kept = book(tmp_path, clock)
    kept.add(Entry(1.0, gpu_id(1), "healthy", "lost", "silent"))
    for number in range(ENTRIES_PER_GPU + 5):
        kept.add(Entry(2.0 + number, GPU, "healthy", "xid-79", "off the bus"))
    kept.save({})
    clock.boot = "boot-2"
    found = book(tmp_path, clock)
    found.recall()
    assert found.ledger == kept.ledger
    of_one = of_gpus(found.ledger, frozenset({GPU}))
    assert [entry.time_s for entry in of_one] == [7.0 + n for n in range(ENTRIES_PER_GPU)]
    assert len(of_gpus(found.ledger, frozenset())) == ENTRIES_PER_GPU + 1


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not Casebook(tmp_path / "file", STEM, Stats(), SetClock()).save({})
