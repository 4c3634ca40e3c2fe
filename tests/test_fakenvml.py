"""The fake driver library, seen as the daemon sees it: through the real pynvml.

pynvml loads the library once for each process, so every test talks to a child
process, which evaluates what it is asked and answers in JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fakenvml import (
    FUNCTIONS,
    FakeGpu,
    FakeNode,
    NoCompiler,
    build,
    h100x8,
    pcie_only,
    write_dev,
    write_sysfs,
)

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN: Final = 999

XID: Final = 8
DOUBLE_BIT_ECC: Final = 2
WHOLE_GPU: Final = 0xFFFFFFFF

CHILD: Final = """
import ctypes, json, sys
from pynvml import *

def gpu(index):
    return nvmlDeviceGetHandleByIndex(index)

def wait(events, timeout_ms):
    got = nvmlEventSetWait(events, timeout_ms)
    uuid = nvmlDeviceGetUUID(got.device) if got.device else None
    return [uuid, got.eventType, got.eventData, got.gpuInstanceId, got.computeInstanceId]

def watch(*indices, types=nvmlEventTypeXidCriticalError):
    events = nvmlEventSetCreate()
    for index in indices:
        nvmlDeviceRegisterEvents(gpu(index), types, events)
    return events

for line in sys.stdin:
    try:
        statement, expression = json.loads(line)
        exec(statement)
        answer = {"value": eval(expression)}
    except NVMLError as error:
        answer = {"nvml": error.value, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""


class NvmlFailed(Exception):
    """The child's call gave an error code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class Child:
    """A process that has pynvml imported and does what it is told."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    def begin(self, expression: str, statement: str = "") -> None:
        """Ask, without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([statement, expression]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What the child answers; anything that JSON knows."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(self.process.wait())
        answer = json.loads(line)
        if "nvml" in answer:
            raise NvmlFailed(answer["nvml"], answer["text"])
        return answer["value"]

    def ask(self, expression: str) -> Any:
        self.begin(expression)
        return self.answer()

    def do(self, statement: str) -> None:
        self.begin("None", statement)
        self.answer()

    def close(self) -> str:
        """End the child; give what it wrote to its stderr."""
        self.process.kill()
        return self.process.communicate()[1]


Start = Callable[..., Child]


@pytest.fixture
def cache(fake_library: Path) -> Path:
    """Where the libraries are built: the whole one lies there already."""
    return fake_library.parent.parent


@pytest.fixture
def start(fake_library: Path) -> Iterator[Start]:
    """Starts a child in which nvmlInit was called, unless told otherwise."""
    children: list[Child] = []

    def start(node: FakeNode, library: Path | None = fake_library, init: bool = True) -> Child:
        child = Child(node.env(library))
        children.append(child)
        if init:
            child.do("nvmlInit()")
        return child

    yield start
    for child in children:
        child.close()


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return h100x8(tmp_path / "node")


def code_of(child: Child, expression: str) -> int:
    """The error code that a call gives; 0 for none."""
    try:
        child.ask(expression)
    except NvmlFailed as failed:
        return failed.code
    return 0


# what the driver tells


def test_a_process_that_loads_the_library_by_its_name_sees_the_scripted_node(
    tmp_path: Path, start: Start
) -> None:
    gpu = FakeGpu(
        "GPU-a1",
        "00000000:1B:00.0",
        minor=3,
        name="A 100%  fake",
        used_bytes=7,
        mig="enabled",
        temperature_celsius=61,
        events="xid",
    )
    child = start(FakeNode(tmp_path, [gpu], driver="535.1", nvml="12.535.1", cuda=12020))
    assert child.ask("nvmlSystemGetDriverVersion()") == "535.1"
    assert child.ask("nvmlSystemGetNVMLVersion()") == "12.535.1"
    assert child.ask("nvmlSystemGetCudaDriverVersion()") == 12020
    assert child.ask("nvmlSystemGetCudaDriverVersion_v2()") == 12020
    assert child.ask("nvmlDeviceGetCount()") == 1
    assert child.ask("nvmlDeviceGetIndex(gpu(0))") == 0
    assert child.ask("nvmlDeviceGetUUID(gpu(0))") == "GPU-a1"
    assert child.ask("nvmlDeviceGetMinorNumber(gpu(0))") == 3
    assert child.ask("nvmlDeviceGetName(gpu(0))") == "A 100%  fake"
    assert child.ask("nvmlDeviceGetMigMode(gpu(0))") == [1, 1]
    assert child.ask("nvmlDeviceGetSupportedEventTypes(gpu(0))") == XID
    assert child.ask("nvmlDeviceGetTemperature(gpu(0), NVML_TEMPERATURE_GPU)") == 61
    assert child.ask("nvmlDeviceGetTemperatureV(gpu(0), NVML_TEMPERATURE_GPU)") == 61
    child.do("memory = nvmlDeviceGetMemoryInfo(gpu(0))")
    assert child.ask("[memory.total, memory.free, memory.used]") == [85520809984, 85520809977, 7]
    child.do("memory = nvmlDeviceGetMemoryInfo(gpu(0), version=nvmlMemory_v2)")
    assert child.ask("[memory.total, memory.reserved, memory.free, memory.used]") == [
        85520809984,
        0,
        85520809977,
        7,
    ]
    child.do("pci = nvmlDeviceGetPciInfo(gpu(0))")
    assert child.ask("[pci.domain, pci.bus, pci.device]") == [0, 0x1B, 0]
    assert child.ask("[pci.busId, pci.busIdLegacy]") == ["00000000:1B:00.0", "0000:1B:00.0"]


def test_a_process_may_load_the_library_by_path_first(
    node: FakeNode, fake_library: Path, start: Start
) -> None:
    child = start(node, library=None, init=False)
    assert code_of(child, "nvmlInit()") == LIBRARY_NOT_FOUND
    child.do(f"ctypes.CDLL({str(fake_library)!r}); nvmlInit()")
    assert child.ask("nvmlDeviceGetCount()") == 8


def test_a_gpu_is_found_by_uuid_and_by_any_spelling_of_its_pci_bus_id(
    node: FakeNode, start: Start
) -> None:
    child = start(node)
    index_of = "nvmlDeviceGetIndex(nvmlDeviceGetHandleBy{})"
    assert child.ask(index_of.format(f"UUID({node.gpus[5].uuid!r})")) == 5
    for spelling in ("00000000:C3:00.0", "0000:c3:00.0", "C3:00.0"):
        assert child.ask(index_of.format(f"PciBusId({spelling!r})")) == 5
    assert code_of(child, "nvmlDeviceGetHandleByUUID('GPU-other')") == NOT_FOUND
    assert code_of(child, "nvmlDeviceGetHandleByPciBusId('0000:ff:00.0')") == NOT_FOUND


def test_a_gpu_without_mig_says_that_it_is_not_supported(tmp_path: Path, start: Start) -> None:
    child = start(pcie_only(tmp_path, 1))
    assert code_of(child, "nvmlDeviceGetMigMode(gpu(0))") == NOT_SUPPORTED


def test_an_hgx_node_has_two_halves_and_all_its_nvlinks_go_to_switches(
    node: FakeNode, start: Start
) -> None:
    child = start(node)
    ancestor = "nvmlDeviceGetTopologyCommonAncestor(gpu({}), gpu({}))"
    assert child.ask(ancestor.format(0, 3)) == 40
    assert child.ask(ancestor.format(3, 0)) == 40
    assert child.ask(ancestor.format(3, 4)) == 50
    assert child.ask(ancestor.format(4, 4)) == 0
    assert child.ask("[nvmlDeviceGetNvLinkState(gpu(7), n) for n in range(18)]") == [1] * 18
    assert child.ask("nvmlDeviceGetNvLinkRemoteDeviceType(gpu(7), 17)") == 2
    assert child.ask("nvmlDeviceGetNvLinkRemotePciInfo(gpu(7), 17).busId") == "00000000:06:00.0"
    assert code_of(child, "nvmlDeviceGetNvLinkState(gpu(7), 18)") == INVALID_ARGUMENT


def test_nvlinks_between_gpus_name_the_peer_and_those_that_are_down_say_so(
    tmp_path: Path, start: Start
) -> None:
    gpus = [FakeGpu(f"GPU-{n}", f"00000000:{n + 1:02X}:00.0") for n in range(3)]
    node = FakeNode(tmp_path, gpus, {(0, 1): "PIX"}, {(0, 0): 1, (0, 2): None, (1, 3): None})
    child = start(node)
    assert child.ask("[nvmlDeviceGetNvLinkState(gpu(0), n) for n in range(3)]") == [1, 0, 0]
    assert child.ask("nvmlDeviceGetNvLinkRemoteDeviceType(gpu(0), 0)") == 0
    assert child.ask("nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), 0).busId") == "00000000:02:00.0"
    assert code_of(child, "nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), 2)") == NOT_SUPPORTED
    assert child.ask("nvmlDeviceGetNvLinkState(gpu(1), 0)") == 0
    assert code_of(child, "nvmlDeviceGetNvLinkState(gpu(2), 0)") == NOT_SUPPORTED
    assert child.ask("nvmlDeviceGetTopologyCommonAncestor(gpu(1), gpu(0))") == 10
    assert child.ask("nvmlDeviceGetTopologyCommonAncestor(gpu(1), gpu(2))") == 50


# initialisation


def test_before_nvmlinit_only_the_library_version_is_told(node: FakeNode, start: Start) -> None:
    child = start(node, init=False)
    child.do("import pynvml; pynvml._LoadNvmlLibrary()")
    for call in (
        "nvmlSystemGetDriverVersion()",
        "nvmlDeviceGetCount()",
        "gpu(0)",
        "nvmlDeviceGetName(c_nvmlDevice_t())",
        "nvmlEventSetCreate()",
        "nvmlShutdown()",
    ):
        assert code_of(child, call) == UNINITIALIZED, call
    assert child.ask("nvmlSystemGetNVMLVersion()") == "12.550.54.15"


def test_initialisation_is_counted(node: FakeNode, start: Start) -> None:
    child = start(node)
    child.do("nvmlInit(); nvmlShutdown()")
    assert child.ask("nvmlDeviceGetCount()") == 8
    child.do("nvmlShutdown()")
    assert code_of(child, "nvmlDeviceGetCount()") == UNINITIALIZED
    assert code_of(child, "nvmlShutdown()") == UNINITIALIZED


def test_handles_and_event_sets_of_an_earlier_initialisation_are_refused(
    node: FakeNode, start: Start
) -> None:
    child = start(node)
    child.do("handle, events = gpu(0), nvmlEventSetCreate()")
    child.do("nvmlShutdown(); nvmlInit(); nvmlEventSetCreate()")
    assert code_of(child, "nvmlDeviceGetUUID(handle)") == INVALID_ARGUMENT
    assert code_of(child, "nvmlEventSetWait(events, 0)") == INVALID_ARGUMENT


def test_wrong_arguments_are_refused(node: FakeNode, start: Start) -> None:
    child = start(node)
    for call in (
        "gpu(8)",
        "nvmlDeviceGetUUID(c_nvmlDevice_t())",
        "nvmlDeviceGetUUID(ctypes.cast(12345, c_nvmlDevice_t))",
        "nvmlDeviceGetTemperature(gpu(0), 1)",
        "nvmlDeviceRegisterEvents(gpu(0), 0, nvmlEventSetCreate())",
        "nvmlDeviceRegisterEvents(gpu(0), 8, c_nvmlEventSet_t())",
        "nvmlEventSetFree(c_nvmlEventSet_t())",
        "nvmlDeviceGetTopologyCommonAncestor(gpu(0), c_nvmlDevice_t())",
    ):
        assert code_of(child, call) == INVALID_ARGUMENT, call
    child.do("lib = ctypes.CDLL('libnvidia-ml.so.1')")
    assert child.ask("lib.nvmlDeviceGetCount_v2(None)") == INVALID_ARGUMENT
    assert child.ask("lib.nvmlDeviceGetUUID(gpu(0), None, 96)") == INVALID_ARGUMENT
    assert child.ask("lib.nvmlDeviceGetUUID(gpu(0), ctypes.create_string_buffer(4), 4)") == 7
    assert code_of(child, "nvmlDeviceGetMemoryInfo(gpu(0), version=1)") == 25


def test_without_a_script_there_is_no_driver(node: FakeNode, start: Start) -> None:
    (node.directory / "script").unlink()
    child = start(node, init=False)
    assert code_of(child, "nvmlInit()") == DRIVER_NOT_LOADED


def test_a_version_mismatch_bars_new_sessions_until_it_is_gone(
    node: FakeNode, start: Start
) -> None:
    running, late = start(node), start(node, init=False)
    node.mismatch()
    assert code_of(late, "nvmlInit()") == LIB_RM_VERSION_MISMATCH
    assert running.ask("nvmlDeviceGetCount()") == 8
    node.mismatch(False)
    assert code_of(late, "nvmlInit()") == 0


# lost GPUs


def test_a_lost_gpu_answers_nothing_until_it_is_back_and_the_library_is_initialised_anew(
    node: FakeNode, start: Start
) -> None:
    child = start(node)
    child.do("handle = gpu(2)")
    node.lose(2)
    for call in (
        "gpu(2)",
        "nvmlDeviceGetUUID(handle)",
        f"nvmlDeviceGetHandleByUUID({node.gpus[2].uuid!r})",
        "nvmlDeviceGetTopologyCommonAncestor(gpu(0), handle)",
    ):
        assert code_of(child, call) == GPU_IS_LOST, call
    assert child.ask("[nvmlDeviceGetCount(), nvmlDeviceGetIndex(gpu(3))]") == [8, 3]
    node.restore(2)
    assert code_of(child, "gpu(2)") == GPU_IS_LOST
    child.do("nvmlShutdown(); nvmlInit()")
    assert child.ask("nvmlDeviceGetUUID(gpu(2))") == node.gpus[2].uuid


def test_a_loss_that_nobody_saw_does_not_stick(node: FakeNode, start: Start) -> None:
    child = start(node)
    node.lose(2)
    assert child.ask("nvmlDeviceGetUUID(gpu(1))") == node.gpus[1].uuid
    node.restore(2)
    assert child.ask("nvmlDeviceGetUUID(gpu(2))") == node.gpus[2].uuid


def test_where_losses_do_not_stick_a_gpu_answers_as_soon_as_it_is_back(
    tmp_path: Path, start: Start
) -> None:
    node = FakeNode(tmp_path, [FakeGpu("GPU-0", "00000000:01:00.0")], sticky_lost=False)
    child = start(node)
    node.lose(0)
    assert code_of(child, "gpu(0)") == GPU_IS_LOST
    node.restore(0)
    assert child.ask("nvmlDeviceGetUUID(gpu(0))") == "GPU-0"


def test_the_gpus_of_a_session_are_those_of_its_beginning(node: FakeNode, start: Start) -> None:
    child = start(node)
    node.remove(0)
    node.put(8, FakeGpu("GPU-new", "00000000:E1:00.0"))
    assert child.ask("nvmlDeviceGetCount()") == 8
    assert code_of(child, "gpu(0)") == GPU_IS_LOST
    child.do("nvmlShutdown(); nvmlInit()")
    assert child.ask("nvmlDeviceGetCount()") == 8
    assert child.ask("[nvmlDeviceGetUUID(gpu(0)), nvmlDeviceGetMinorNumber(gpu(0))]") == [
        node.gpus[1].uuid,
        1,
    ]
    assert child.ask("nvmlDeviceGetUUID(gpu(7))") == "GPU-new"


# faults


def test_a_failure_can_be_for_one_gpu(node: FakeNode, start: Start) -> None:
    node.fail("nvmlDeviceGetName", code=UNKNOWN, gpu=2)
    child = start(node)
    assert code_of(child, "nvmlDeviceGetName(gpu(2))") == UNKNOWN
    assert child.ask("nvmlDeviceGetName(gpu(1))") == "NVIDIA H100 80GB HBM3"
    node.clear_faults()
    assert child.ask("nvmlDeviceGetName(gpu(2))") == "NVIDIA H100 80GB HBM3"


def test_a_failure_between_two_gpus_strikes_either_way_round(node: FakeNode, start: Start) -> None:
    node.fail("nvmlDeviceGetTopologyCommonAncestor", code=NOT_SUPPORTED, gpu=2)
    child = start(node)
    ancestor = "nvmlDeviceGetTopologyCommonAncestor(gpu({}), gpu({}))"
    assert code_of(child, ancestor.format(1, 2)) == NOT_SUPPORTED
    assert code_of(child, ancestor.format(2, 1)) == NOT_SUPPORTED
    assert code_of(child, ancestor.format(1, 3)) == 0


def test_a_failure_can_begin_late_and_end_and_counts_on_when_the_script_changes(
    node: FakeNode, start: Start
) -> None:
    node.fail("nvmlDeviceGetCount_v2", code=UNKNOWN, after=3, count=2)
    child = start(node)
    codes = [code_of(child, "nvmlDeviceGetCount()") for _ in range(3)]
    node.lose(7)
    codes += [code_of(child, "nvmlDeviceGetCount()") for _ in range(2)]
    assert codes == [0, 0, UNKNOWN, UNKNOWN, 0]


def test_nvmlinit_can_fail(node: FakeNode, start: Start) -> None:
    node.fail("nvmlInitWithFlags", code=DRIVER_NOT_LOADED, count=1)
    child = start(node, init=False)
    assert code_of(child, "nvmlInit()") == DRIVER_NOT_LOADED
    assert code_of(child, "nvmlDeviceGetCount()") == UNINITIALIZED
    assert code_of(child, "nvmlInit()") == 0


def test_an_error_that_pynvml_has_no_words_for_is_described_by_the_library(
    node: FakeNode, start: Start
) -> None:
    node.fail("nvmlDeviceGetCount_v2", code=25)
    child = start(node)
    with pytest.raises(NvmlFailed, match="Argument version mismatch"):
        child.ask("nvmlDeviceGetCount()")


def test_a_slow_call_answers_late(node: FakeNode, start: Start) -> None:
    node.slow("nvmlDeviceGetUUID", ms=200, gpu=1)
    child = start(node)
    child.do("import time")
    child.do("begin = time.monotonic(); nvmlDeviceGetUUID(gpu(1)); took = time.monotonic() - begin")
    assert 0.2 <= child.ask("took") < 5
    child.do("begin = time.monotonic(); nvmlDeviceGetUUID(gpu(0)); took = time.monotonic() - begin")
    assert child.ask("took") < 0.2


def test_a_hanging_call_never_returns_and_leaves_other_threads_alone(
    node: FakeNode, start: Start
) -> None:
    node.hang("nvmlDeviceGetUUID", gpu=1)
    child = start(node)
    child.do("import threading")
    child.do("hung = threading.Thread(target=nvmlDeviceGetUUID, args=(gpu(1),), daemon=True)")
    child.do("hung.start()")
    node.await_call("nvmlDeviceGetUUID 1")
    assert child.ask("nvmlDeviceGetUUID(gpu(0))") == node.gpus[0].uuid
    node.clear_faults()
    assert child.ask("nvmlDeviceGetUUID(gpu(1))") == node.gpus[1].uuid
    assert child.ask("hung.join(0.05) or hung.is_alive()") is True


def test_a_crashing_call_ends_its_process(node: FakeNode, start: Start) -> None:
    node.crash("nvmlDeviceGetUUID", gpu=1)
    child = start(node)
    assert child.ask("nvmlDeviceGetUUID(gpu(0))") == node.gpus[0].uuid
    with pytest.raises(EOFError):
        child.ask("nvmlDeviceGetUUID(gpu(1))")
    assert child.process.wait() == -signal.SIGSEGV


def test_a_fault_for_a_function_that_does_not_exist_is_refused(node: FakeNode) -> None:
    with pytest.raises(ValueError, match="the fake library has no nvmlDeviceGetUuid"):
        node.fail("nvmlDeviceGetUuid", code=UNKNOWN)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("explode 1", "script, line 1: unknown statement, or not its number of words: explode"),
        ("gpu 0 uuid=GPU-0", "a GPU needs uuid= and pci=: 0"),
        ("cuda 12040\nfail nvmlX", "script, line 2: fail needs code=: nvmlX"),
        ("lost -1", "not a number: -1"),
        ("driver 5%2", "bad escape: %2"),
    ],
)
def test_a_mistake_in_a_script_ends_the_process_with_a_word_about_it(
    script: str, complaint: str, node: FakeNode, start: Start
) -> None:
    (node.directory / "script").write_text(script + "\n", encoding="utf-8")
    child = start(node, init=False)
    with pytest.raises(EOFError):
        child.ask("nvmlInit()")
    assert child.process.wait() == -signal.SIGABRT
    assert complaint in child.close()


# events


def test_a_wait_without_events_ends_in_a_timeout(node: FakeNode, start: Start) -> None:
    child = start(node)
    child.do("import time; events = watch(0)")
    assert code_of(child, "wait(events, 0)") == TIMEOUT
    child.do("begin = time.monotonic()")
    assert code_of(child, "wait(events, 50)") == TIMEOUT
    assert 0.05 <= child.ask("time.monotonic() - begin") < 5


def test_events_arrive_in_order_with_all_that_was_told_about_them(
    node: FakeNode, start: Start
) -> None:
    child = start(node)
    child.do("events = watch(1, 2, types=nvmlEventTypeXidCriticalError | 2)")
    node.xid(1, 79)
    node.xid(2, 94, gi=1, ci=0)
    node.event(2, DOUBLE_BIT_ECC, 17)
    node.xid(None, 119)
    arrived = [child.ask("wait(events, 1000)") for _ in range(4)]
    assert arrived == [
        [node.gpus[1].uuid, XID, 79, WHOLE_GPU, WHOLE_GPU],
        [node.gpus[2].uuid, XID, 94, 1, 0],
        [node.gpus[2].uuid, DOUBLE_BIT_ECC, 17, WHOLE_GPU, WHOLE_GPU],
        [None, XID, 119, WHOLE_GPU, WHOLE_GPU],
    ]
    assert code_of(child, "wait(events, 0)") == TIMEOUT


def test_only_what_was_registered_and_happened_since_is_delivered(
    node: FakeNode, start: Start
) -> None:
    node.xid(0, 13)
    child = start(node)
    child.do("events = watch(0); other = watch(1)")
    node.xid(2, 31)
    node.event(0, DOUBLE_BIT_ECC, 1)
    node.xid(0, 48)
    assert child.ask("wait(events, 1000)")[:3] == [node.gpus[0].uuid, XID, 48]
    assert code_of(child, "wait(events, 0)") == TIMEOUT
    assert code_of(child, "wait(other, 0)") == TIMEOUT


def test_an_event_wakes_a_waiting_thread_at_once(node: FakeNode, start: Start) -> None:
    child = start(node)
    child.do("import time; events = watch(0)")
    latencies_s = []
    for _ in range(5):
        child.begin("[wait(events, 10_000)[2], time.monotonic()]")
        time.sleep(0.02)  # most likely it waits by now; if not, the test is only weaker
        written = time.monotonic()
        node.xid(0, 79)
        code, woken = child.answer()
        assert code == 79
        latencies_s.append(woken - written)
    # Well below a millisecond on an idle machine. Who only looks every 100 ms would need 80.
    assert min(latencies_s) < 0.05


def test_threads_that_wait_for_different_gpus_each_get_their_own(
    node: FakeNode, start: Start
) -> None:
    child = start(node)
    child.do("from concurrent.futures import ThreadPoolExecutor; pool = ThreadPoolExecutor(4)")
    child.do("sets = [watch(index) for index in range(4)]")
    child.do("waits = [pool.submit(wait, events, 10_000) for events in sets]")
    for gpu in (3, 1, 0, 2):
        node.xid(gpu, 60 + gpu)
    assert child.ask("[wait.result()[2] for wait in waits]") == [60, 61, 62, 63]


def test_a_wait_ends_when_its_event_set_or_the_session_goes_away(
    node: FakeNode, start: Start
) -> None:
    child = start(node)
    child.do("from concurrent.futures import ThreadPoolExecutor; pool = ThreadPoolExecutor(2)")
    child.do("freed, kept = watch(0), watch(0)")
    child.do("waits = [pool.submit(wait, events, 60_000) for events in (freed, kept)]")
    node.await_call("nvmlEventSetWait_v2", count=2)
    child.do("nvmlEventSetFree(freed)")
    assert child.ask("waits[0].exception().value") == INVALID_ARGUMENT
    child.do("nvmlShutdown()")
    assert child.ask("waits[1].exception().value") == UNINITIALIZED


def test_a_gpu_registers_only_the_event_types_that_it_has(tmp_path: Path, start: Start) -> None:
    gpus = [
        FakeGpu("GPU-0", "00000000:01:00.0", events="none"),
        FakeGpu("GPU-1", "00000000:02:00.0", events="xid"),
        FakeGpu("GPU-2", "00000000:03:00.0", events=3),
    ]
    child = start(FakeNode(tmp_path, gpus))
    assert child.ask("[nvmlDeviceGetSupportedEventTypes(gpu(n)) for n in range(3)]") == [0, 8, 3]
    assert code_of(child, "[watch(0)][1:]") == NOT_SUPPORTED
    assert code_of(child, "[watch(1)][1:]") == 0
    assert code_of(child, "[watch(1, types=8 | 2)][1:]") == NOT_SUPPORTED


# the log and the build


def test_each_call_is_logged_with_the_gpu_that_it_is_about(node: FakeNode, start: Start) -> None:
    child = start(node)
    child.do("handle = gpu(3)")
    node.forget_calls()
    child.do("nvmlDeviceGetUUID(handle); nvmlDeviceGetNvLinkState(handle, 0)")
    child.do("nvmlDeviceGetCount(); nvmlShutdown(); nvmlInit()")
    assert node.calls() == [
        "nvmlDeviceGetUUID 3",
        "nvmlDeviceGetNvLinkState 3",
        "nvmlDeviceGetCount_v2",
        "nvmlShutdown",
        "nvmlInitWithFlags",
    ]
    with pytest.raises(TimeoutError, match="nvmlDeviceGetUUID 4 was not called"):
        node.await_call("nvmlDeviceGetUUID 4", timeout_s=0)


def test_an_older_library_lacks_functions(node: FakeNode, cache: Path, start: Start) -> None:
    lacking = frozenset({"nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetMigMode"})
    child = start(node, build(cache, without=lacking))
    ancestor = "nvmlDeviceGetTopologyCommonAncestor(gpu(0), gpu(1))"
    assert code_of(child, ancestor) == FUNCTION_NOT_FOUND
    assert code_of(child, "nvmlDeviceGetMigMode(gpu(0))") == FUNCTION_NOT_FOUND
    assert child.ask("nvmlDeviceGetUUID(gpu(0))") == node.gpus[0].uuid


def test_the_library_is_compiled_once(fake_library: Path, cache: Path) -> None:
    before = fake_library.stat()
    assert build(cache) == fake_library
    assert fake_library.stat().st_mtime_ns == before.st_mtime_ns
    assert fake_library.name == "libnvidia-ml.so.1"


def test_leaving_out_a_function_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no nvmlDeviceGetCount$"):
        build(tmp_path, without=frozenset({"nvmlDeviceGetCount"}))


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompiler, match="gcc"):
        build(tmp_path)


def test_the_library_exports_every_function_that_can_be_named_in_a_fault(
    node: FakeNode, start: Start
) -> None:
    child = start(node)
    child.do("lib = ctypes.CDLL('libnvidia-ml.so.1')")
    assert child.ask(f"[n for n in {sorted(FUNCTIONS)} if not hasattr(lib, n)]") == []
    assert "nvmlDeviceGetHandleByIndex_v2" in FUNCTIONS


def test_many_threads_may_call_while_the_script_changes(node: FakeNode, start: Start) -> None:
    child = start(node)
    child.do("from concurrent.futures import ThreadPoolExecutor; pool = ThreadPoolExecutor(4)")
    child.do("look = lambda n: [nvmlDeviceGetUUID(gpu(n % 8)) for _ in range(200)][-1]")
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            node.put(7, node.gpus[7])
            node.xid(7, 31)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        seen = child.ask("list(pool.map(look, range(8)))")
    finally:
        stop.set()
        changing.join()
    assert seen == [gpu.uuid for gpu in node.gpus.values()]


# the files around


def test_fake_sysfs_links_devices_below_bridges_as_linux_does(tmp_path: Path) -> None:
    write_sysfs(
        tmp_path,
        {"0000:1b:00.0": 0, "0000:c3:00.0": -1, "0000:df:00.0": None},
        {0: "0-15,32-47", 1: "16-31", 2: ""},
        bridge_numa_nodes={"0000:c3:00.0": 1},
    )
    links = tmp_path / "bus/pci/devices"
    gpu = (links / "0000:c3:00.0").resolve()
    assert gpu == tmp_path / "devices/pci0000:c2/0000:c2:01.0/0000:c3:00.0"
    assert not (links / "0000:c3:00.0").readlink().is_absolute()
    assert (links / "0000:c2:01.0").resolve() == gpu.parent
    assert (links / "0000:1b:00.0/numa_node").read_text() == "0\n"
    assert (gpu / "numa_node").read_text() == "-1\n"
    assert (gpu.parent / "numa_node").read_text() == "1\n"
    assert not (links / "0000:df:00.0/numa_node").exists()
    nodes = tmp_path / "devices/system/node"
    assert (nodes / "node0/cpulist").read_text() == "0-15,32-47\n"
    assert (nodes / "node2/cpulist").read_text() == "\n"
    assert (nodes / "online").read_text() == "0-2\n"
    assert (nodes / "has_cpu").read_text() == "0-1\n"


def test_gpus_know_how_sysfs_writes_their_bus_id(node: FakeNode) -> None:
    assert node.gpus[0].sysfs_id == "0000:1b:00.0"


def test_fake_device_nodes_are_character_devices(tmp_path: Path) -> None:
    write_dev(tmp_path / "dev", [0, 3])
    nodes = list((tmp_path / "dev").iterdir())
    assert all(node.is_char_device() for node in nodes)
    assert sorted(node.name for node in nodes) == [
        "nvidia-uvm",
        "nvidia0",
        "nvidia3",
        "nvidiactl",
    ]
