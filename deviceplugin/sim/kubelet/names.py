"""Which resource names the kubelet takes: extended resources only.

Stated apart from the plugin's own check on purpose: this side plays the
kubelet, and a mistake in one must not hide in the other.
"""

from __future__ import annotations

import re

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_QUALIFIED = re.compile(
    rf"(?P<domain>{_LABEL}(?:\.{_LABEL})*)/[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
)


def is_extended_resource(name: str) -> bool:
    """As the kubelet judges it."""
    match = _QUALIFIED.fullmatch(name)
    if match is None or name.startswith("requests."):
        return False
    domain = match["domain"]
    native = domain == "kubernetes.io" or domain.endswith(".kubernetes.io")
    return not native and len(domain) <= 253
