"""deviceplugin.standing"""

from __future__ import annotations

from dataclasses import replace

import pytest

from deviceplugin.config import Settings
from deviceplugin.lifecycle import Phase, State
from deviceplugin.model import Fault, Snapshot
from deviceplugin.standing import Standing, details, rows, stand, status
from tests.builders import gpu_id, snapshot

WAITING = State(Phase.NOTHING_TO_PUBLISH)
R = "vendor.example/gpu"


def seen(state: State, found: Snapshot, *, require_gpu: bool = False) -> Standing:
    settings = Settings(require_gpu=require_gpu)
    return stand(settings, state, found, no_kubelet="no directory", looking_for_s=3.4)


def trouble(code: str) -> Snapshot:
    return Snapshot(trouble=Fault(code, "so it is"))


@pytest.mark.parametrize("code", ["driver_missing", "no_gpu"])
def test_a_node_with_nothing_to_publish_is_idle_and_ready(code: str) -> None:
    idle = seen(WAITING, trouble(code))
    assert idle == Standing(True, "idle", ("nothing to publish: so it is",))
    missing = seen(WAITING, trouble(code), require_gpu=True)
    assert missing == Standing(
        False, "waiting for GPUs", (f"{R}: waiting for GPUs", "driver: so it is")
    )


@pytest.mark.parametrize("code", ["driver_mismatch", "driver_hung", "driver_crashed"])
def test_a_driver_in_trouble_is_not_nothing(code: str) -> None:
    assert not seen(WAITING, trouble(code)).ready


def test_before_the_first_look_nothing_is_known() -> None:
    lines = (f"{R}: waiting for GPUs", "driver: the first look at the GPUs takes 3 s so far")
    assert seen(WAITING, Snapshot()) == Standing(False, "waiting for GPUs", lines)


def test_registered_is_ready_whatever_the_driver_does() -> None:
    found = replace(snapshot([0]), trouble=Fault("driver_hung", "it hangs"))
    assert seen(State(Phase.REGISTERED), found) == Standing(True, "registered", ())


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (State(Phase.NO_KUBELET), "no directory"),
        (State(Phase.BACKING_OFF, why="refused"), "last try: refused"),
        (State(Phase.OWNED_BY_OTHER, owner="pod a, pid 7"), "it is served by pod a, pid 7"),
    ],
)
def test_what_it_waits_for_is_said(state: State, line: str) -> None:
    found = seen(state, snapshot([0]))
    assert (found.ready, found.lines) == (False, (f"{R}: {state.phase.value}", line))


def test_a_status_is_a_row_for_each_device_and_a_line_for_each_sick_one() -> None:
    found = snapshot([0, None], sick={1: "xid-79"})
    state = State(Phase.REGISTERED)
    told = status(Settings(), seen(state, found), state, found)
    for device in told["devices"]:
        device["since"], device["until"] = 86_400.0, None
    assert rows(told) == [
        ("0", gpu_id(0), "0", "Healthy"),
        ("1", gpu_id(1), "-", "Unhealthy xid-79"),
    ]
    assert details(told) == [
        f"{gpu_id(1)}: xid-79 since 1970-01-02 00:00:00 UTC: because of xid-79; ends with: a reset"
    ]
