"""deviceplugin.allocation"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import allocation
from deviceplugin.errors import DeviceUnhealthy, RequestError
from deviceplugin.model import Snapshot
from tests.builders import gpu_id, snapshot

EIGHT = snapshot([0, 0, 0, 0, 1, 1, 1, 1])


def prefer(
    node: Snapshot, available: list[int], size: int, must_include: tuple[int, ...] = ()
) -> list[int]:
    chosen = allocation.prefer(
        node, [gpu_id(n) for n in available], [gpu_id(n) for n in must_include], size
    )
    return [int(name[-12:]) for name in chosen]


# --- prefer -----------------------------------------------------------------------


def test_one_node_serves_the_whole_container() -> None:
    assert prefer(EIGHT, [2, 3, 4, 5, 6], 3) == [4, 5, 6]


def test_the_smallest_node_that_fits_is_taken_so_that_larger_sets_stay_whole() -> None:
    assert prefer(EIGHT, [0, 1, 2, 3, 6, 7], 2) == [6, 7]
    assert prefer(EIGHT, [0, 1, 2, 3, 7], 1) == [7]


def test_where_no_node_fits_the_largest_comes_first() -> None:
    assert prefer(EIGHT, [0, 4, 5, 6], 4) == [0, 4, 5, 6]
    assert prefer(EIGHT, [0, 1, 4, 5, 6], 4) == [0, 4, 5, 6]


def test_the_rest_goes_where_the_must_includes_are() -> None:
    assert prefer(EIGHT, [0, 1, 2, 3, 4, 5, 6, 7], 2, (5,)) == [4, 5]
    assert prefer(EIGHT, [0, 1, 2, 3, 4, 5], 2, (0,)) == [0, 1]


def test_devices_without_a_numa_node_come_after_those_with_one() -> None:
    assert prefer(snapshot([None, None, 0]), [0, 1, 2], 2) == [0, 2]
    assert prefer(snapshot([None, None, 0]), [0, 1, 2], 1) == [2]


def test_unhealthy_devices_that_a_racing_kubelet_offers_come_last() -> None:
    node = snapshot([0, 0, 0, 1], sick={0: "xid-79"})
    assert prefer(node, [0, 1, 2, 3], 2) == [1, 2]
    assert prefer(node, [0, 1, 2, 3], 4) == [0, 1, 2, 3]


def test_size_zero_needs_nothing() -> None:
    assert prefer(EIGHT, [0, 1], 0) == []


def test_unknown_devices_are_passed_over_when_the_rest_suffices() -> None:
    assert prefer(EIGHT, [0, 77], 1) == [0]


@pytest.mark.parametrize(
    ("available", "size", "must_include", "text"),
    [
        ([0, 1], 1, (0, 1), "2 must-include devices do not fit into an allocation of 1: "),
        ([0, 1], 2, (5,), f"must-include devices are not among the available: {gpu_id(5)}"),
        ([0, 77], 2, (77,), f"must-include devices are not published here: {gpu_id(77)}"),
        ([0, 77], 2, (), f"known; not published here: {gpu_id(77)}"),
        ([0, 1], 3, (), "3 devices are wanted and 2 of the available are known"),
        ([0, 1], -1, (), "allocation size -1 is negative"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_with_names(
    available: list[int], size: int, must_include: tuple[int, ...], text: str
) -> None:
    with pytest.raises(RequestError) as caught:
        prefer(EIGHT, available, size, must_include)
    assert text in str(caught.value)


def test_an_error_text_stays_short_whatever_was_asked() -> None:
    with pytest.raises(RequestError) as caught:
        allocation.plan(EIGHT, ["x" * 10_000 + str(n) for n in range(1000)])
    assert len(str(caught.value)) < 1000


@given(
    numa=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=10),
    data=st.data(),
    seed=st.integers(),
)
def test_the_answer_is_exact_and_never_depends_on_the_order(
    numa: list[int | None], data: st.DataObject, seed: int
) -> None:
    numbers = list(range(len(numa)))
    sick = data.draw(st.sets(st.sampled_from(numbers)))
    available = data.draw(st.lists(st.sampled_from(numbers), unique=True))
    must = data.draw(st.sets(st.sampled_from(available))) if available else set()
    size = data.draw(st.integers(len(must), len(available)))
    node = snapshot(numa, sick=dict.fromkeys(sick, "lost"))
    chosen = prefer(node, available, size, tuple(must))
    assert len(chosen) == len(set(chosen)) == size
    assert must <= set(chosen) <= set(available)
    shuffled = available + available[:1]
    random.Random(seed).shuffle(shuffled)  # noqa: S311  # no secret
    assert prefer(node, shuffled, size, tuple(sorted(must, reverse=True))) == chosen
    if not must and not sick and size:
        fits = [n for n in {0, 1, 2} if sum(numa[g] == n for g in available) >= size]
        if fits:
            assert len({numa[g] for g in chosen}) == 1


# --- plan -------------------------------------------------------------------------


def test_a_container_gets_its_gpus_their_nodes_and_the_control_nodes_once() -> None:
    plan = allocation.plan(EIGHT, [gpu_id(4), gpu_id(1), gpu_id(4)])
    assert [str(device.id) for device in plan.devices] == [gpu_id(1), gpu_id(4)]
    assert plan.envs == {"NVIDIA_VISIBLE_DEVICES": f"{gpu_id(1)},{gpu_id(4)}"}
    assert plan.nodes == ("/dev/nvidia1", "/dev/nvidia4", "/dev/nvidiactl", "/dev/nvidia-uvm")


def test_an_empty_request_is_refused() -> None:
    with pytest.raises(RequestError, match="no devices are named"):
        allocation.plan(EIGHT, [])


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="not published here: GPU-nope"):
        allocation.plan(EIGHT, [gpu_id(0), "GPU-nope"])


def test_a_name_that_cannot_be_seen_is_quoted() -> None:
    with pytest.raises(RequestError, match=r"not published here: '', 'a\\x00b'"):
        allocation.plan(EIGHT, ["", "a\0b"])


def test_an_unhealthy_device_is_refused_with_its_reason() -> None:
    node = snapshot([0, 0], sick={1: "xid-79"})
    with pytest.raises(DeviceUnhealthy, match=rf"unhealthy: {gpu_id(1)} \(xid-79\)"):
        allocation.plan(node, [gpu_id(0), gpu_id(1)])
