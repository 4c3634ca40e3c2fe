"""The kubelet's pod-resources service: which active pod holds which device.

A second opinion beside the checkpoint, which has the finished pods too but may
be half-written. Only this module dials that socket.
"""

from __future__ import annotations

from pathlib import Path

TIMEOUT_S = 1.0
MESSAGE_MAX_BYTES = 16 * 1024 * 1024
"""As much as the kubelet's own clients take."""


def active_holders(socket: Path, resource: str) -> dict[str, str] | None:
    """Who holds which device of one resource.

    Returns:
        Device id to "namespace/name" of a pod; None when the kubelet does not say.
    """
    import grpc  # loaded already in a daemon that serves

    from api.podresources.v1 import api_pb2 as pr
    from api.podresources.v1.api_pb2_grpc import PodResourcesListerStub

    options = (
        ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
        ("grpc.enable_retries", 0),
    )
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        try:
            answer = PodResourcesListerStub(channel).List(
                pr.ListPodResourcesRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError:
            return None
    return {
        name: f"{pod.namespace}/{pod.name}"
        for pod in answer.pod_resources
        for container in pod.containers
        for devices in container.devices
        if devices.resource_name == resource
        for name in devices.device_ids
    }
