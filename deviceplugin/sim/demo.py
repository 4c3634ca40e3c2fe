"""``deviceplugin demo``: the daemon's whole job on simulated hardware, step by step.

Starts the embedded kubelet and, as a child process, ``deviceplugin run
--simulate`` in a temporary directory, and checks every step that it shows:
real sockets, real processes, simulated GPUs. Exit code 0 only if all held.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deviceplugin.sim import profile
from deviceplugin.sim.kubelet import Container, Kubelet, Pod
from deviceplugin.sim.profile import Profile
from deviceplugin.sim.screen import Screen

RESOURCE = "vendor.example/gpu"
PATIENCE_S = 15.0
STOP_WITHIN_S = 5.0
HOLD_DOWN_S = 1.0
"""Nobody wants to watch a demo wait for a minute."""


class StepFailed(Exception):
    """A step did not hold; the text says what was seen instead."""


def run(profile_name: str, *, keep: bool) -> int:
    """Run the demo.

    Args:
        profile_name: as for ``--simulate``.
        keep: leave it running at the end, until it is interrupted.

    Returns:
        The exit code.
    """
    loaded = profile.load(profile_name)
    screen = Screen()
    with _directory() as directory:
        demo = Demo(loaded, profile_name, directory, screen)
        try:
            with demo.kubelet:
                demo.play()
                if keep:
                    demo.stay()
                demo.end()
        except StepFailed as failure:
            screen.failed(str(failure))
            screen.text("the daemon's last words:")
            for line in demo.last_words():
                screen.text(f"  {line}")
            return 1
        except KeyboardInterrupt:
            screen.text("interrupted")
            return 130
        finally:
            demo.kill()
    return 0


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """A temporary directory whose path is short enough for unix sockets."""
    base = tempfile.gettempdir()
    short = "/tmp" if len(base) > 24 and os.access("/tmp", os.W_OK) else base  # noqa: S108  # as said
    path = Path(tempfile.mkdtemp(prefix="deviceplugin-demo-", dir=short))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Demo:
    """The steps. Each raises StepFailed when it does not hold."""

    def __init__(self, loaded: Profile, name: str, directory: Path, screen: Screen) -> None:
        self._profile = loaded
        self._name = name
        self._screen = screen
        self._fifo = directory / "control"
        self._state_dir = directory / "state"
        self._log = directory / "daemon.log"
        self.kubelet = Kubelet(directory / "kubelet", pod_resources_dir=directory / "pods")
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._count = len(loaded.gpus)
        self._figures: list[tuple[str, str]] = []

    def play(self) -> None:
        """Everything up to the stop."""
        self._discover()
        self._register()
        held = self._admit_pods()
        sick = self._fall_sick(held)
        self._recover(sick)
        self._restart_kubelet()
        self._look_at_metrics()

    # --- steps ------------------------------------------------------------------------

    def _discover(self) -> None:
        title = "Discovery: what the daemon will publish"
        with self._screen.step(title):
            command = [sys.executable, "-m", "deviceplugin", "inspect", "--json"]
            result = subprocess.run(
                [*command, "--simulate", self._name],
                env=_environment(),
                capture_output=True,
                check=False,
            )
            if result.returncode != 0:
                raise StepFailed(f"inspect failed: {result.stderr.decode().strip()}")
            gpus = json.loads(result.stdout)["gpus"]
            self._expect(len(gpus) == self._count, f"{len(gpus)} GPUs, not {self._count}")
            self._screen.table(
                ("GPU", "ID", "PCI", "NUMA", "HEALTH"),
                [
                    (
                        str(gpu["index"]),
                        gpu["id"],
                        gpu["pci_bus_id"],
                        "-" if gpu["numa"]["node"] is None else str(gpu["numa"]["node"]),
                        gpu["health"],
                    )
                    for gpu in gpus
                ],
            )
            self._screen.result(f"{len(gpus)} x {gpus[0]['model']}")

    def _register(self) -> None:
        with self._screen.step("Registration with the kubelet"):
            self._started_s = time.monotonic()
            with self._log.open("wb") as log:
                self._child = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "deviceplugin", "run"),
                        *("--simulate", self._name, "--simulate-control", str(self._fifo)),
                        *("--device-plugin-dir", str(self.kubelet.directory)),
                        *("--state-dir", str(self._state_dir)),
                        *("--metrics-address", "127.0.0.1:0", "--log-format", "json"),
                        *("--health-hold-down", f"{HOLD_DOWN_S:g}"),
                    ],
                    env=_environment(),
                    stdout=log,
                    stderr=log,
                )
            self._wait_allocatable(self._count)
            took_ms = self._ms_until_registered(self._started_s)
            self._screen.result(f"registered {took_ms:.0f} ms after the process was started")
            self._screen.result(f"allocatable: {RESOURCE} {self._count}")
            self._figures.append(("start → registered", f"{took_ms:.0f} ms"))

    def _admit_pods(self) -> set[str]:
        """Pods of a quarter and of half the node, so that some GPUs stay free."""
        sizes = [("train", self._count // 4), ("serve", self._count // 2)]
        wanted = [(name, size) for name, size in sizes if size > 0 and self._count > 1]
        if self._count in (2, 3):
            wanted = [("train", 1)]
        held: set[str] = set()
        if not wanted:
            return held
        with self._screen.step("Pods are admitted: which GPUs, on which NUMA nodes"):
            for name, size in wanted:
                pod = _pod(name, size)
                admission = self.kubelet.admit(pod)
                self._expect(admission.admitted, f"pod {name} was refused: {admission.message}")
                (grant,) = admission.grants
                visible = grant.response.envs["NVIDIA_VISIBLE_DEVICES"].split(",")
                self._expect(
                    sorted(visible) == list(grant.devices),
                    f"pod {name} was given {grant.devices} and told {visible}",
                )
                nodes = ", ".join(map(str, grant.numa_nodes)) or "not known"
                self._screen.result(f"pod {name}: {size} GPUs, NUMA node {nodes}")
                for device in grant.devices:
                    self._screen.detail(device)
                held |= set(grant.devices)
        return held

    def _fall_sick(self, held: set[str]) -> str:
        with self._screen.step("Xid 79 on a free GPU: it is withdrawn at once"):
            sick = next(gpu.id for gpu in self._profile.gpus if gpu.id not in held)
            asked_s = time.monotonic()
            self._control(f"xid {sick} 79")
            self._wait_allocatable(self._count - 1)
            took_ms = (self.kubelet.happened("list")[-1].at_s - asked_s) * 1000
            self._screen.result(f"allocatable: {self._count - 1}, {took_ms:.1f} ms after the Xid")
            self._figures.append(("Xid → new list at the kubelet", f"{took_ms:.1f} ms"))
            free = self._count - len(held)
            admission = self.kubelet.admit(_pod("late", free))
            self._expect(not admission.admitted, f"a pod got {sick}, which is sick")
            self._screen.result(f"pod late, {free} GPUs: refused, {admission.reason}")
            self._screen.detail(admission.message)
        return sick

    def _recover(self, sick: str) -> None:
        with self._screen.step("The GPU is reset: it is offered again after a while"):
            self._control(f"reset {sick}")
            self._wait_allocatable(self._count)
            admission = self.kubelet.admit(_pod("later", 1))
            self._expect(admission.admitted, f"pod later was refused: {admission.message}")
            self._screen.result(
                f"allocatable: {self._count} after {HOLD_DOWN_S:g} s without anything new (else"
                " 60 s)"
            )
            self._screen.result("a pod that needs one is admitted")

    def _restart_kubelet(self) -> None:
        with self._screen.step("The kubelet restarts and wipes the sockets"):
            self.kubelet.restart(downtime_s=0.2)
            back_s = self.kubelet.happened("started")[-1].at_s
            self._wait_allocatable(self._count)
            took_ms = self._ms_until_registered(back_s)
            self._screen.result(f"registered again {took_ms:.1f} ms after kubelet.sock was back")
            self._expect(
                not self.kubelet.crashes, f"the kubelet would crash: {self.kubelet.crashes}"
            )
            self._figures.append(("kubelet restart → registered", f"{took_ms:.1f} ms"))

    def _look_at_metrics(self) -> None:
        with self._screen.step("Metrics"):
            url = f"{self._metrics_url()}/metrics"
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:  # noqa: S310  # http
                lines = answer.read().decode().splitlines()
            shown = (
                "deviceplugin_devices{",
                "deviceplugin_registered{",
                "deviceplugin_xid_errors_total{",
            )
            found = [line for line in lines if line.startswith(shown)]
            healthy = (
                f'deviceplugin_devices{{health="Healthy",resource="{RESOURCE}"}} {self._count}.0'
            )
            self._expect(healthy in found, f"no {healthy!r} among {found}")
            for line in found:
                self._screen.detail(line)

    def stay(self) -> None:
        """Leave everything running until interrupted."""
        self._screen.text("")
        self._screen.text("it stays running; look at it from another terminal, Ctrl-C ends it:")
        python = f"{sys.executable} -m deviceplugin"
        for line in (
            f"curl {self._metrics_url()}/metrics",
            f"{python} status --state-dir {self._state_dir}",
            f"echo 'xid 0 79' > {self._fifo}      # then: echo 'reset 0' > {self._fifo}",
        ):
            self._screen.text(f"  {line}")
        with contextlib.suppress(KeyboardInterrupt):
            while self._child is not None and self._child.poll() is None:
                time.sleep(0.2)

    def end(self) -> None:
        """Stop the daemon, and sum up."""
        with self._screen.step("SIGTERM: the daemon leaves nothing behind"):
            if self._child is None:
                raise StepFailed("the daemon was never started")
            asked_s = time.monotonic()
            self._child.send_signal(signal.SIGTERM)
            try:
                code = self._child.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                raise StepFailed(f"the daemon did not stop within {STOP_WITHIN_S:.0f} s") from None
            took_ms = (time.monotonic() - asked_s) * 1000
            self._expect(code == 0, f"exit code {code}")
            left = sorted(path.name for path in self.kubelet.directory.glob("*.sock"))
            self._expect(left == ["kubelet.sock"], f"sockets left behind: {left}")
            self._screen.result(f"exit code 0 after {took_ms:.0f} ms, no socket left")
            self._figures.append(("SIGTERM → exit", f"{took_ms:.0f} ms"))
        self._screen.summary(
            f"every step held: {self._count} simulated GPUs, profile {self._name}", self._figures
        )

    # --- tools --------------------------------------------------------------------------

    def kill(self) -> None:
        """Whatever happened: leave no daemon behind."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()

    def last_words(self) -> list[str]:
        """The end of the daemon's log."""
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return []

    def _expect(self, held: bool, otherwise: str) -> None:
        if not held:
            raise StepFailed(otherwise)

    def _wait_allocatable(self, count: int) -> None:
        if self.kubelet.wait_allocatable(RESOURCE, count, PATIENCE_S):
            return
        code = self._child.poll() if self._child is not None else None
        ended = f"; the daemon ended with exit code {code}" if code is not None else ""
        seen = self.kubelet.allocatable(RESOURCE)
        raise StepFailed(f"allocatable is {seen} and not {count} after {PATIENCE_S:.0f} s{ended}")

    def _ms_until_registered(self, since_s: float) -> float:
        return (self.kubelet.happened("registered")[-1].at_s - since_s) * 1000

    def _control(self, line: str) -> None:
        with self._fifo.open("w", encoding="utf-8") as fifo:
            fifo.write(line + "\n")

    def _metrics_url(self) -> str:
        """The address is in the daemon's log: port 0 let the system choose."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for line in self._log.read_text(encoding="utf-8").splitlines():
                event: dict[str, Any] = json.loads(line)
                if event["event"] == "metrics served":
                    return f"http://{event['host']}:{event['port']}"
            time.sleep(0.02)
        raise StepFailed("the daemon did not say where its metrics are")


def _pod(name: str, gpus: int) -> Pod:
    return Pod(name, (Container("main", {RESOURCE: gpus}),))


def _environment() -> dict[str, str]:
    """The daemon's environment: nothing set for another daemon may change the demo."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("DEVICEPLUGIN_")
    } | {"GRPC_VERBOSITY": "NONE"}
