"""``deviceplugin run`` as a process, with the embedded kubelet and a fake or simulated node."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deviceplugin.sim.kubelet import Container, Kubelet, Pod

RESOURCE = "vendor.example/gpu"


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A temporary directory with a path short enough for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="dp-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings for a daemon."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DEVICEPLUGIN")}
    for name in ("NODE_NAME", "POD_NAME"):
        env.pop(name, None)
    return env | {"GRPC_VERBOSITY": "NONE"} | dict(extra)


class Daemon:
    """A running daemon. Its log is read as it comes; ``close`` kills what is left."""

    def __init__(self, directory: Path, *flags: str, env: Mapping[str, str] | None = None) -> None:
        """Start it on ``directory``: kubelet in "dp", state in "state", any port for metrics."""
        self.directory = directory
        self.events: list[dict[str, Any]] = []
        self.garbage: list[str] = []
        self._news = threading.Condition()
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "deviceplugin", "run"),
                *("--device-plugin-dir", str(directory / "dp")),
                *("--state-dir", str(directory / "state")),
                *("--metrics-address", "127.0.0.1:0"),
                *("--log-format", "json", "--log-level", "debug", "--health-hold-down", "0"),
                *flags,
            ],
            env=environment(env or {}),
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                with self._news:
                    try:
                        self.events.append(json.loads(line))
                    except ValueError:
                        self.garbage.append(line)
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def event(self, name: str, count: int = 1, **fields: object) -> dict[str, Any]:
        """Wait for the count-th log event of this name and with these fields."""

        def found() -> list[dict[str, Any]]:
            return [
                event
                for event in self.events
                if event["event"] == name and fields.items() <= event.items()
            ]

        with self._news:
            came = self._news.wait_for(lambda: len(found()) >= count, 20)
            assert came, f"no {name!r} {fields} in {self.events} {self.garbage}"
            return found()[count - 1]

    def get(self, path: str) -> tuple[int, str]:
        """Ask the HTTP endpoint."""
        served = self.event("metrics served")
        url = f"http://{served['host']}:{served['port']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:  # http
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_ready(self, text: str | None = None) -> str:
        """Until /readyz is good, or until it is bad and says ``text``."""
        answer = ""
        for _ in range(2000):
            status, answer = self.get("/readyz")
            if (status == 200) if text is None else (status == 503 and text in answer):
                return answer
            time.sleep(0.01)
        raise AssertionError(f"/readyz goes on saying {answer!r}, not {text!r}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(10)
        self._reader.join(10)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)


class Node:
    """A directory with a kubelet and, once started, a daemon."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        self.kubelet = Kubelet(directory / "dp", pod_resources_dir=directory / "pods")
        stack.callback(self.kubelet.stop)

    def start(self, *flags: str, env: Mapping[str, str] | None = None) -> Daemon:
        daemon = Daemon(self.directory, *flags, env=env)
        self._stack.callback(daemon.close)
        return daemon

    def wait_allocatable(self, count: int) -> None:
        got = self.kubelet.wait_allocatable(RESOURCE, count, 20)
        assert got, f"allocatable is {self.kubelet.allocatable(RESOURCE)}, not {count}"

    def wait_for(self, good: Callable[[], bool]) -> None:
        assert self.kubelet.wait_for(good, 20), self.kubelet.events

    def sockets(self) -> list[str]:
        """Names of the sockets in the kubelet's directory, its own left out."""
        return sorted(
            path.name
            for path in self.kubelet.directory.iterdir()
            if path.is_socket() and path.name != "kubelet.sock"
        )


def pod(name: str, gpus: int) -> Pod:
    """A pod of one container."""
    return Pod(name, (Container("main", {RESOURCE: gpus}),))


def command(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command of the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "deviceplugin", *arguments],
        env=environment(env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
