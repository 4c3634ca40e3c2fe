"""deviceplugin.sim.profile"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.errors import ProfileError
from deviceplugin.model import PcieLevel
from deviceplugin.sim import profile

TOPOLOGIES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data/topologies.json").read_text(encoding="utf-8")
)

GOOD = """
model: NVIDIA L4
memoryMiB: 23034
numaNodes: {0: 0-7, 1: ""}
gpus:
  - {pci: "0000:16:00.0", numa: 0}
  - {pci: "0000:98:00.0", numa: null, uuid: GPU-mine, minor: 7, mig: true, memoryMiB: 1}
pcie: [X -, "- X"]
"""


def mistakes(text: str) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        profile.parse("p", text)
    return list(caught.value.mistakes)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_shipped_profiles_have_the_published_numa_nodes_and_links(name: str) -> None:
    loaded, topology = profile.load(name), TOPOLOGIES[name]
    assert list(loaded.numa) == topology["numa"]
    index = {gpu.id: gpu.index for gpu in loaded.gpus}
    count = len(loaded.gpus)
    assert len(loaded.links) == count * (count - 1) // 2
    for link in loaded.links:
        a, b = index[link.a], index[link.b]
        assert link.pcie.value == topology["pcie"][a][b]
        assert link.nvlinks == topology["nvlink"][a][b]


def test_every_shipped_profile_can_be_loaded() -> None:
    assert profile.shipped() == ["a100x8", "dgx1v", "h100x8", "l40sx8", "l4x1", "v100x16"]
    counts = {name: len(profile.load(name).gpus) for name in profile.shipped()}
    assert counts == {"a100x8": 8, "dgx1v": 8, "h100x8": 8, "l40sx8": 8, "l4x1": 1, "v100x16": 16}


def test_a_dgx_a100_has_its_gpus_on_four_of_eight_nodes() -> None:
    loaded = profile.load("a100x8")
    assert len(loaded.cpus) == 8
    assert set(loaded.numa) == {1, 3, 5, 7}


def test_ids_are_the_same_every_time_and_never_twice() -> None:
    ids = [gpu.id for name in profile.shipped() for gpu in profile.load(name).gpus]
    again = [gpu.id for name in profile.shipped() for gpu in profile.load(name).gpus]
    assert ids == again
    assert len(set(ids)) == len(ids)
    assert all(len(name) == len("GPU-") + 36 for name in ids)


def test_a_file_of_ones_own_says_what_the_shipped_ones_say(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    loaded = profile.load(str(path))
    first, second = loaded.gpus
    assert (first.model, first.memory_bytes, first.minor) == ("NVIDIA L4", 23034 << 20, 0)
    assert (second.id, second.minor, second.mig_enabled) == ("GPU-mine", 7, True)
    assert loaded.numa == (0, None)
    (link,) = loaded.links
    assert (link.pcie, link.nvlinks) == (PcieLevel.UNKNOWN, 0)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"shipped are a100x8, .*give a path, as in ./my.yaml"):
        profile.load("h200x8")


@pytest.mark.parametrize("path", ["./no.yaml", "/etc", "no.json"])
def test_a_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(ProfileError, match=f"{path}: cannot be read: "):
        profile.load(path)


def test_all_mistakes_are_reported_at_once() -> None:
    text = """
model: NVIDIA L4
memoryMiB: 0
numaNodes: {0: "0-"}
gpus:
  - {pci: "0000:16:00.0", numa: 0}
  - {pci: "0000:16:00.0", numa: 3}
  - {pci: "16:00.0", numa: 0}
pcie: [X SYS PIX, SYS X FAR, NODE FAR X]
nvlinks: [0 1, 1 0]
"""
    assert mistakes(text) == [
        "p: memoryMiB: 0 is not positive",
        "p: numaNodes.0: '0-' is no list of CPUs, as in '0-15,32-47'",
        "p: gpus: pci 0000:16:00.0 is used more than once",
        "p: gpus.1.numa: there is no node 3 in numaNodes",
        "p: gpus.2.pci: '16:00.0' is no bus id as in sysfs, '0000:1b:00.0'",
        "p: pcie: GPUs 0 and 2: PIX one way and NODE the other",
        "p: pcie.1: 'FAR' is none of X - SYS NODE PHB PXB PIX PSB",
        "p: pcie.2: 'FAR' is none of X - SYS NODE PHB PXB PIX PSB",
        "p: nvlinks: must have a row and a column for each of the 3 GPUs",
    ]


def test_wrong_types_and_unknown_keys_are_reported_at_once() -> None:
    text = GOOD.replace("NVIDIA L4", "7").replace("23034", "many") + "colour: green\n"
    found = mistakes(text)
    assert any("model: 7 is not of type 'string'" in mistake for mistake in found)
    assert any("memoryMiB: 'many' is not of type 'integer'" in mistake for mistake in found)
    assert any("'colour' was unexpected" in mistake for mistake in found)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "p: must hold keys and values, starting with 'model: …'"),
        ("- a", "p: must hold keys and values, starting with 'model: …'"),
        (GOOD + "model: other", "p: line 8: model: is set twice"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, mistake: str) -> None:
    assert mistakes(text.lstrip()) == [mistake]


def test_a_bool_is_no_number() -> None:
    assert mistakes(GOOD.replace("memoryMiB: 23034", "memoryMiB: true"))


def test_no_gpu_is_no_profile() -> None:
    text = yaml.safe_dump(yaml.safe_load(GOOD) | {"gpus": [], "pcie": []})
    assert mistakes(text) == ["p: gpus: 0 GPUs; from 1 to 64 are possible"]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a value."""
    found = [path] if path else []
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, item in items:
        found += _paths(item, (*path, key))
    return found


LOADED = yaml.safe_load(GOOD)


@given(
    path=st.sampled_from(_paths(LOADED)),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.just({}),
        st.just([]),
    ),
)
def test_any_single_value_that_is_replaced_gives_a_profile_or_a_profile_error(
    path: tuple[Any, ...], value: Any
) -> None:
    content = yaml.safe_load(GOOD)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    outcome: object
    try:
        outcome = profile.parse("p", yaml.safe_dump(content)).gpus
    except ProfileError as error:
        outcome = error.mistakes
    assert outcome
