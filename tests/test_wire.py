"""deviceplugin.wire, and the stubs against the kubelet's own encoding"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from api.pluginregistration.v1 import api_pb2 as registration
from api.podresources.v1 import api_pb2 as podresources
from api.v1beta1 import api_pb2 as pb
from deviceplugin import allocation, wire
from tests.builders import gpu_id, snapshot

# Encoded by the kubelet's own definitions: hex, and the same content as JSON.
VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data/wire.json").read_text(encoding="utf-8")
)
PACKAGES: dict[str, Any] = {
    "v1beta1": pb,
    "v1": podresources,
    "pluginregistration": registration,
}


def message_type(name: str) -> type[Message]:
    package, _, message = name.partition(".")
    found: type[Message] = getattr(PACKAGES[package], message)
    return found


def test_there_is_a_vector_for_every_message_of_the_three_apis() -> None:
    ours = {
        f"{package}.{name}"
        for package, module in PACKAGES.items()
        for name in module.DESCRIPTOR.message_types_by_name
    }
    empty = {"v1.ListPodResourcesRequest", "pluginregistration.InfoRequest"}
    assert ours - empty <= {vector["message"] for vector in VECTORS}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['message']}-{v['hex'][:16]}")
def test_messages_decode_and_encode_byte_for_byte(vector: dict[str, Any]) -> None:
    kind = message_type(vector["message"])
    data = bytes.fromhex(vector["hex"])
    decoded = kind.FromString(data)
    assert decoded.SerializeToString(deterministic=True) == data
    assert decoded == json_format.ParseDict(vector["json"], kind())


@pytest.mark.parametrize(
    ("module", "service", "methods"),
    [
        (pb, "Registration", {"Register"}),
        (
            pb,
            "DevicePlugin",
            {
                "GetDevicePluginOptions",
                "ListAndWatch",
                "GetPreferredAllocation",
                "Allocate",
                "PreStartContainer",
            },
        ),
        (podresources, "PodResourcesLister", {"List", "GetAllocatableResources", "Get"}),
        (registration, "Registration", {"GetInfo", "NotifyRegistrationStatus"}),
    ],
)
def test_services_have_the_kubelets_methods(module: Any, service: str, methods: set[str]) -> None:
    assert set(module.DESCRIPTOR.services_by_name[service].methods_by_name) == methods


def test_a_device_without_a_numa_node_gets_no_topology_field() -> None:
    message = wire.device_list(snapshot([0, None], sick={0: "lost"}).devices)
    with_hint, without = message.devices
    assert with_hint.HasField("topology")
    assert [node.ID for node in with_hint.topology.nodes] == [0]
    assert with_hint.health == "Unhealthy"
    assert not without.HasField("topology")
    assert without.health == "Healthy"


def test_a_container_response_names_host_paths_and_may_read_and_write() -> None:
    plan = allocation.plan(snapshot([0]), [gpu_id(0)])
    response = wire.container_response(plan)
    assert response.envs["NVIDIA_VISIBLE_DEVICES"] == gpu_id(0)
    assert [(d.host_path, d.container_path, d.permissions) for d in response.devices] == [
        (path, path, "rw") for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
    ]


def test_the_registration_says_v1beta1_and_a_file_name() -> None:
    request = wire.register_request("vendor.example_gpu.0123abcd.sock", "vendor.example/gpu")
    assert request.version == "v1beta1"
    assert request.endpoint == "vendor.example_gpu.0123abcd.sock"
    assert request.options.get_preferred_allocation_available
    assert not request.options.pre_start_required
