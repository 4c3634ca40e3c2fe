"""deviceplugin.holders and deviceplugin.podresources, with the embedded kubelet"""

from __future__ import annotations

from deviceplugin import podresources
from deviceplugin.checkpoint import Checkpoint
from deviceplugin.holders import Holders
from tests.daemon import RESOURCE, Node, pod


def holders(node: Node) -> Holders:
    socket = node.directory / "pods/kubelet.sock"
    return Holders(Checkpoint(node.kubelet.directory, RESOURCE), socket, RESOURCE)


def test_both_sources_tell_who_holds_what(node: Node) -> None:
    node.kubelet.start()
    node.start("--simulate", "h100x8")
    node.wait_allocatable(8)
    train = pod("train", 2)
    (grant,) = node.kubelet.admit(train).grants
    asked = holders(node)
    by_uid = dict.fromkeys(grant.devices, f"the pod with uid {train.uid}")
    by_name = dict.fromkeys(grant.devices, "pod default/train")
    assert asked.held() == by_uid
    assert asked.held(named=True) == by_name
    checkpoint = node.kubelet.directory / "kubelet_internal_checkpoint"
    good = checkpoint.read_bytes()
    checkpoint.write_bytes(good[:20])
    assert asked.held() == by_name, "the other one helps out"
    node.kubelet.stop()
    assert asked.held() is None, "not known is not nobody"
    checkpoint.write_bytes(good)
    assert asked.held(named=True) == by_uid


def test_other_resources_and_absent_services_are_told_apart(node: Node) -> None:
    socket = node.directory / "pods/kubelet.sock"
    assert podresources.active_holders(socket, RESOURCE) is None
    node.kubelet.start()
    node.start("--simulate", "h100x8")
    node.wait_allocatable(8)
    assert node.kubelet.admit(pod("train", 2)).admitted
    assert len(podresources.active_holders(socket, RESOURCE) or {}) == 2
    assert podresources.active_holders(socket, "vendor.example/other") == {}
