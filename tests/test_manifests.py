"""What lies in manifests/ fits the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deviceplugin import __version__, config
from deviceplugin.cli import _parser

ROOT = Path(__file__).parent.parent
DAEMON_SET: dict[str, Any] = yaml.safe_load((ROOT / "manifests/daemonset.yaml").read_text())
POD = DAEMON_SET["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_a_rollout_never_has_two_plugins_on_a_node() -> None:
    assert DAEMON_SET["spec"]["updateStrategy"]["rollingUpdate"] == {
        "maxUnavailable": 1,
        "maxSurge": 0,
    }


def test_the_arguments_are_understood() -> None:
    _parser().parse_args(CONTAINER["args"])
    _parser().parse_args([*CONTAINER["args"], "--simulate=h100x8"])


def test_the_mounts_are_where_the_defaults_look() -> None:
    paths = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    settings = config.Settings()
    assert paths == {
        "device-plugins": settings.device_plugin_dir,
        "pod-resources": str(Path(settings.pod_resources_socket).parent),
        "state": settings.state_dir,
    }
    hosts = {volume["name"]: volume["hostPath"]["path"] for volume in POD["volumes"]}
    assert hosts == paths


def test_the_probes_ask_where_the_daemon_answers() -> None:
    _, port = config.parse_address(config.Settings().metrics_address)
    assert CONTAINER["ports"] == [{"name": "metrics", "containerPort": port}]
    assert CONTAINER["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert CONTAINER["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


def test_the_image_has_this_version() -> None:
    assert CONTAINER["image"] == f"gpu-device-plugin:{__version__}"
    assert f"gpu-device-plugin:{__version__}" in (ROOT / "Containerfile").read_text()
    assert f"gpu-device-plugin:{__version__}" in (ROOT / "README.md").read_text()
