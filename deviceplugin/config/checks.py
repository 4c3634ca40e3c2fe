"""What is wrong with a single value, as sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from deviceplugin.config.settings import (
    CONTROL_SOCKET,
    FIELDS,
    SOCKET_SUFFIX_LENGTH,
    UNIX_PATH_MAX_BYTES,
    Field,
    socket_stem,
)

_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def check_resource_name(name: str) -> str | None:
    """Why the kubelet would refuse this extended resource name; None when it would not."""
    domain, slash, rest = name.partition("/")
    if not slash:
        return f"{name!r} needs a domain, as in 'vendor.example/gpu'"
    if "/" in rest:
        return f"{name!r} has more than one '/'"
    if len(domain) > 253 or not _DOMAIN.fullmatch(domain):
        return f"{name!r}: the domain must be lower-case DNS labels, as in 'vendor.example'"
    if len(rest) > 63 or not _NAME.fullmatch(rest):
        return (
            f"{name!r}: after the '/' come at most 63 of A-Z a-z 0-9 - _ . with a letter or"
            " digit at both ends"
        )
    if domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
        return f"{name!r}: kubernetes.io is reserved"
    if name.startswith("requests."):
        return f"{name!r}: 'requests.' is reserved for quotas"
    return None


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:9451" or "[::1]:0".

    Raises:
        ValueError: with a sentence about what is wrong.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: write an IPv6 address in brackets, as in '[::1]:9451'")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} must be HOST:PORT with a port from 0 to 65535")
    return host or "0.0.0.0", int(port)  # noqa: S104  # ":9451" means every address


def check(field: Field, value: Any) -> Iterable[str]:
    """What is wrong with one value, as sentences."""
    if value is None:
        return
    if isinstance(field.default, bool):
        if not isinstance(value, bool):
            yield f"{value!r} is neither true nor false"
        return
    if isinstance(field.default, float):
        if not isinstance(value, int | float) or isinstance(value, bool):
            yield f"{value!r} is not a number of seconds"
        elif not field.least <= value <= 3600:
            yield f"{value} is not between {field.least:g} and 3600 seconds"
        return
    if field.name == "health_max_unhealthy":
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1000:
            yield f"{value!r} is no number of GPUs from 0 to 1000"
        return
    if isinstance(field.default, dict | tuple):
        yield from _check_items(field, value)
        return
    if "\0" in value or "\n" in value:
        yield f"{value!r} holds a NUL or a line break"
    elif field.choices:
        if value not in field.choices:
            yield f"{value!r} is not one of {', '.join(field.choices)}"
    elif field.name == "resource_name":
        trouble = check_resource_name(value)
        if trouble:
            yield trouble
    elif field.name == "metrics_address":
        if value:
            try:
                parse_address(value)
            except ValueError as error:
                yield str(error)
    elif field.name in _PATHS:
        yield from _check_path(field.name, value)
    elif value == "":
        yield "is empty"


def _check_items(field: Field, items: Any) -> Iterator[str]:
    """A list of words, or a table of Xid codes and words."""
    for key in items if isinstance(items, dict) else ():
        if not (key.isascii() and key.isdigit() and len(key) <= 5):
            yield f"{key!r} is no Xid code"
    for word in items.values() if isinstance(items, dict) else items:
        if word not in field.choices:
            yield f"{word!r} is not one of {', '.join(field.choices)}"


_PATHS = frozenset(
    field.name
    for field in FIELDS
    if field.name.endswith(("_dir", "_root", "_socket")) or field.name == "simulate_control"
)
_LONGEST_SOCKET = {
    "state_dir": 1 + len(CONTROL_SOCKET),
    "pod_resources_socket": 0,
}


def _check_path(name: str, value: str) -> Iterator[str]:
    if not value.startswith("/"):
        yield f"{value!r} is not an absolute path"
    if name in _LONGEST_SOCKET:
        yield from _check_length(value, _LONGEST_SOCKET[name])


def check_plugin_dir(directory: str, resource: str) -> Iterator[str]:
    """Whether the resource's sockets have room in the kubelet's directory."""
    yield from _check_length(directory, 1 + len(socket_stem(resource)) + SOCKET_SUFFIX_LENGTH)


def _check_length(path: str, more: int) -> Iterator[str]:
    room = UNIX_PATH_MAX_BYTES - more
    if len(path.encode()) > room:
        yield (
            f"{path!r} is too long: a unix socket in it would pass {UNIX_PATH_MAX_BYTES} bytes;"
            f" at most {room} are possible here"
        )
