"""Simulation profiles: the shipped ones are right, and a wrong one is explained."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.errors import ProfileError
from deviceplugin.model import DriverInfo, PcieLevel
from deviceplugin.sim import profile

# Per profile the NUMA nodes, PCIe scores and NVLinks of the vendors' published topologies.
TOPOLOGIES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "topologies.json").read_text(encoding="utf-8")
)

SMALL = """
model: NVIDIA L40S
memoryMiB: 46068
driver: "550.54.15"
numaNodes:
  0: 0-31
  1: ""
gpus:
  - {pci: "0000:16:00.0", numa: 0}
  - {pci: "0000:98:00.0", numa: null, mig: true, minor: 5, model: NVIDIA A30, memoryMiB: 24576}
pcie:
  - X   -
  - "-  X"
nvlinks:
  - 0 4
  - 4 0
"""


def _mistakes(text: str) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        profile.parse("mine", text)
    return [mistake.removeprefix("mine: ") for mistake in caught.value.mistakes]


def _changed(*path: str | int, to: Any) -> str:
    """SMALL with one value replaced."""
    content = yaml.safe_load(SMALL)
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return json.dumps(content)


# --- what is shipped ----------------------------------------------------------------


def test_these_profiles_are_shipped() -> None:
    assert profile.shipped() == ["a100x8", "dgx1v", "h100x8", "l40sx8", "l4x1", "v100x16"]


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_a_shipped_profile_has_the_published_topology(name: str) -> None:
    loaded, expected = profile.load(name), TOPOLOGIES[name]
    position = {gpu.id: gpu.index for gpu in loaded.gpus}
    count = len(loaded.gpus)
    pcie = [[0] * count for _ in range(count)]
    nvlink = [[0] * count for _ in range(count)]
    for link in loaded.links:
        a, b = position[link.a], position[link.b]
        assert link.nvlinks is not None
        pcie[a][b] = pcie[b][a] = link.pcie.value
        nvlink[a][b] = nvlink[b][a] = link.nvlinks
    assert list(loaded.numa) == expected["numa"]
    assert pcie == expected["pcie"]
    assert nvlink == expected["nvlink"]


@pytest.mark.parametrize("name", profile.shipped())
def test_a_shipped_profile_has_a_link_for_each_pair_and_no_id_twice(name: str) -> None:
    loaded = profile.load(name)
    count = len(loaded.gpus)
    assert len(loaded.links) == count * (count - 1) // 2
    assert len({gpu.id for gpu in loaded.gpus}) == count
    assert [gpu.index for gpu in loaded.gpus] == list(range(count))
    assert all(gpu.events and gpu.fault is None for gpu in loaded.gpus)


def test_a_dgx_a100_has_eight_numa_nodes_and_gpus_on_four_of_them() -> None:
    loaded = profile.load("a100x8")
    assert sorted(loaded.cpus) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert set(loaded.numa) == {1, 3, 5, 7}


def test_the_single_l4_has_no_links() -> None:
    loaded = profile.load("l4x1")
    assert loaded.links == ()
    assert loaded.gpus[0].model == "NVIDIA L4"
    assert loaded.gpus[0].memory_bytes == 23034 * 1024 * 1024


def test_the_format_is_described_at_the_top_of_every_shipped_file() -> None:
    folder = Path(profile.__file__).parent / "profiles"
    for name in profile.shipped():
        comments = [
            line
            for line in (folder / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
            if line.startswith("#")
        ]
        for key in ("model", "memoryMiB", "driver", "numaNodes", "gpus", "pcie", "nvlinks"):
            assert any(key in line for line in comments), (name, key)


# --- what a profile says ------------------------------------------------------------


def test_every_key_is_read() -> None:
    loaded = profile.parse("small", SMALL)
    one, other = loaded.gpus
    assert loaded.name == "small"
    assert loaded.driver == DriverInfo("550.54.15", None, None)
    assert (one.model, one.memory_bytes, one.minor) == ("NVIDIA L40S", 46068 << 20, 0)
    assert (one.pci_bus_id, one.mig_enabled) == ("0000:16:00.0", None)
    assert (other.model, other.memory_bytes, other.minor) == ("NVIDIA A30", 24576 << 20, 5)
    assert (other.pci_bus_id, other.mig_enabled) == ("0000:98:00.0", True)
    assert loaded.numa == (0, None)
    assert dict(loaded.cpus) == {0: "0-31", 1: ""}
    (link,) = loaded.links
    assert (link.a, link.b) == (one.id, other.id)
    assert (link.pcie, link.nvlinks) == (PcieLevel.UNKNOWN, 4)


def test_uuids_stay_the_same_from_start_to_start() -> None:
    """They are what the kubelet remembers of a pod."""
    assert profile.load("h100x8").gpus[0].id == "GPU-687089ef-d05a-5235-b24e-4804f33d393d"
    assert profile.load("h100x8") == profile.load("h100x8")
    assert profile.load("h100x8").gpus[0].id != profile.load("a100x8").gpus[0].id


@pytest.mark.parametrize("given_id", ["GPU-00000000-0000-4000-8000-000000000007", "GPU-mine"])
def test_a_uuid_can_be_given(given_id: str) -> None:
    loaded = profile.parse("small", _changed("gpus", 1, "uuid", to=given_id))
    assert loaded.gpus[1].id == given_id


def test_json_is_as_good_as_yaml() -> None:
    """JSON has no keys but texts, NUMA nodes included."""
    as_json = json.dumps(yaml.safe_load(SMALL))
    assert profile.parse("small", as_json) == profile.parse("small", SMALL)


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_file_of_ones_own_is_read_by_its_path(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"small{suffix}").write_text(_changed("model", to="Mine"), encoding="utf-8")
    by_name, by_path = profile.load(f"small{suffix}"), profile.load(f"{tmp_path}/small{suffix}")
    assert by_name.name == "small"
    assert by_name.gpus[0].model == "Mine"
    assert by_name == by_path


# --- what is wrong with one -----------------------------------------------------------


def test_an_unknown_name_lists_the_shipped_ones_and_how_to_pass_a_file() -> None:
    with pytest.raises(ProfileError) as caught:
        profile.load("h200x8")
    (mistake,) = caught.value.mistakes
    assert mistake == (
        "there is no profile 'h200x8': shipped are a100x8, dgx1v, h100x8, l40sx8, l4x1, v100x16;"
        " for a file of your own give a path, as in ./my.yaml"
    )


@pytest.mark.parametrize("path", ["./absent.yaml", "/", "./nul\0.yaml"])
def test_a_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        profile.load(path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"x\.yaml: cannot be read"):
        profile.load(f"{tmp_path}/x.yaml")


def test_all_mistakes_are_told_at_once() -> None:
    text = """
modle: NVIDIA L40S
memoryMiB: true
numaNodes: {0: 0-31, -1: 3}
gpus:
  - {pci: "0000:16:00.0", numa: 0, mig: 1}
  - {pci: "0000:16:00.0", numa: 2, minor: 0}
  - {numa: 0, colour: red}
pcie:
  - X   SYS SYS
  - PIX SYS FAR
"""
    assert _mistakes(text) == [
        "modle: unknown key; did you mean model?",
        "memoryMiB: true is not a whole number from 1 to 16777216",
        "model: is missing",
        "numaNodes.-1: a node is a whole number from 0 to 1023",
        "numaNodes.-1: 3 is not a list of CPUs in quotes, as in '0-15,32-47'",
        "gpus.0.mig: 1 is neither true nor false",
        "gpus.1.numa: there is no node 2 in numaNodes",
        "gpus.1.pci: 0000:16:00.0 is that of GPU 0 already",
        "gpus.1.minor: 0 is that of GPU 0 already",
        "gpus.2.colour: unknown key",
        "gpus.2.pci: is missing",
        "pcie: has 2 lines for 3 GPUs",
        "pcie.0: has 3 columns where the table has 2 lines",
        "pcie.1: has 3 columns where the table has 2 lines",
        "pcie.1: a GPU and itself are 'X', not 'SYS'",
        "pcie.1: 'FAR' is not one of - SYS NODE PHB PXB PIX PSB",
        "pcie.1: GPUs 0 and 1 are 'SYS' one way and 'PIX' the other",
    ]


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("model",), None, "model: null is not a line of text"),
        (("model",), "two\nlines", "model: 'two\\nlines' is not a line of text"),
        (("memoryMiB",), 1.5, "memoryMiB: 1.5 is not a whole number from 1 to 16777216"),
        (("memoryMiB",), 0, "memoryMiB: 0 is not a whole number from 1 to 16777216"),
        (("driver",), 550.54, "driver: 550.54 is not a line of text"),
        (("gpus",), [], "gpus: 0 GPUs; from 1 to 64 are possible"),
        (("gpus", 0), "x", "gpus.0: 'x' is not a GPU, as in {pci: '0000:1b:00.0', numa: 0}"),
        (("gpus", 0, "pci"), "16:00.0", "gpus.0.pci: '16:00.0' is not a bus id as sysfs writes it"),
        (("gpus", 0, "pci"), "00000000:16:00.0", "gpus.0.pci: '00000000:16:00.0' is not a bus id"),
        (("gpus", 0, "numa"), True, "gpus.0.numa: true is not a whole number from 0 to 1023"),
        (("gpus", 0, "uuid"), "0", "gpus.0.uuid: '0' is not a UUID of a GPU: 'GPU-' and"),
        (("gpus", 0, "uuid"), "GPU-a,b", "gpus.0.uuid: 'GPU-a,b' is not a UUID of a GPU"),
        (("gpus", 0, "minor"), 5, "gpus.1.minor: 5 is that of GPU 0 already"),
        (("gpus", 1, "minor"), 0, "gpus.1.minor: 0 is that of GPU 0 already"),
        (("numaNodes", 0), "0-", "numaNodes.0: '0-' is not a list of CPUs in quotes"),
        (("numaNodes", "x"), "0", "numaNodes.x: a node is a whole number from 0 to 1023"),
        (("numaNodes", "00"), "0", "numaNodes.00: a node is a whole number from 0 to 1023"),
        (("pcie",), ["X SYS"], "pcie: has 1 lines for 2 GPUs"),
        (("pcie", 0), "X", "pcie.0: has 1 columns where the table has 2 lines"),
        (("pcie", 0), "X X", "pcie.0: 'X' is not one of - SYS NODE PHB PXB PIX PSB"),
        (("pcie", 0), "X NV4", "pcie.0: 'NV4' is not one of - SYS NODE PHB PXB PIX PSB"),
        (("nvlinks", 0), 0, "nvlinks: every line must be a text; put one with a single number"),
        (("nvlinks", 0), "0 04", "nvlinks.0: '04' is not a number of NVLinks from 0 to 99"),
        (("nvlinks", 0), "1 4", "nvlinks.0: a GPU and itself are '0', not '1'"),
        (("nvlinks", 0), "0 5", "nvlinks.1: GPUs 0 and 1 are '5' one way and '4' the other"),
    ],
)
def test_a_single_mistake_is_told_with_its_place(
    path: tuple[str | int, ...], value: object, sentence: str
) -> None:
    assert any(mistake.startswith(sentence) for mistake in _mistakes(_changed(*path, to=value)))


def test_a_given_uuid_must_not_be_the_one_another_gpu_has_by_default() -> None:
    first = profile.parse("mine", SMALL).gpus[0].id
    text = _changed("gpus", 1, "uuid", to=first)
    assert _mistakes(text) == [f"gpus.1.uuid: {first} is that of GPU 0 already"]


def test_more_gpus_than_a_node_can_have_are_refused() -> None:
    gpus = [{"pci": f"0000:{bus:02x}:00.0", "numa": 0} for bus in range(65)]
    assert "gpus: 65 GPUs; from 1 to 64 are possible" in _mistakes(_changed("gpus", to=gpus))


def test_a_key_that_is_set_twice_is_refused() -> None:
    assert _mistakes(SMALL + "model: NVIDIA L4\n") == ["line 17: model: is set twice"]


def test_a_numa_node_that_is_set_twice_in_two_spellings_is_refused() -> None:
    assert _mistakes(SMALL.replace('1: ""', "'0': 0-31")) == ["numaNodes.0: is set twice"]


@pytest.mark.parametrize("text", ["", "[]", "h100x8", "3"])
def test_a_text_without_keys_is_refused(text: str) -> None:
    assert _mistakes(text) == ["must hold keys and values, starting with 'model: …'"]


@pytest.mark.parametrize(
    "text", ["a: [", "\tx: 1", 'a: !!int ""', "a: !!bool 7", "a: !!timestamp x", "[" * 5000]
)
def test_a_text_that_is_no_yaml_is_refused(text: str) -> None:
    (mistake,) = _mistakes(text)
    assert mistake.startswith("is neither YAML nor JSON: ")


def test_a_wrong_value_of_any_size_makes_a_short_sentence() -> None:
    for value in ("0x" + "f" * 5000, "x" * 5000, "[" + "1, " * 5000 + "]", "&a [*a, *a]"):
        for mistake in _mistakes(SMALL.replace("46068", value)):
            assert len(mistake) < 120


# --- nothing but ProfileError ---------------------------------------------------------

_SHIPPED = {
    name: yaml.safe_load(
        (Path(profile.__file__).parent / "profiles" / f"{name}.yaml").read_text(encoding="utf-8")
    )
    for name in ("a100x8", "l4x1")
}


def _places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    steps: list[Any] = []
    if isinstance(content, dict):
        steps = list(content)
    elif isinstance(content, list):
        steps = list(range(len(content)))
    return [path, *(place for step in steps for place in _places(content[step], (*path, step)))]


@st.composite
def _broken(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> str:
    """A shipped profile with one value replaced."""
    content = {"root": copy.deepcopy(_SHIPPED[draw(st.sampled_from(sorted(_SHIPPED)))])}
    *path, last = draw(st.sampled_from(_places(content)[1:]))
    inner: Any = content
    for step in path:
        inner = inner[step]
    inner[last] = draw(values)
    return yaml.safe_dump(content["root"])


_WRONG_EVERYWHERE = st.sampled_from([-1, 1.5, 10**30, "\0", [[1]], [None], {"?": 1}, {1: []}])
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(_broken(_WRONG_EVERYWHERE))
def test_a_profile_with_one_broken_value_is_refused(text: str) -> None:
    assert _mistakes(text)


@given(_broken(_ANYTHING))
def test_a_profile_with_one_value_changed_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ProfileError):
        assert len(profile.parse("mine", text).gpus) in (1, 8)


@given(st.text() | st.text("{}[]:-!&*?|>'\"%@` \n\t0ax,"))
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(ProfileError):
        profile.parse("mine", text)
