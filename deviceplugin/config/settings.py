"""The settings themselves: names, texts, types and defaults. No parsing here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

ENV_PREFIX = "DEVICEPLUGIN_"
FILE_VERSION = "v1"

UNIX_PATH_MAX_BYTES = 107
"""The longest path a unix socket can have on Linux (sun_path, less its NUL)."""

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
MonitoringLost = Literal["report", "unhealthy"]


XidEffect = Literal["ignore", "report", "unhealthy"]
HealthMode = Literal["enforce", "observe"]
HealthSource = Literal[
    "xid",
    "answer",
    "recovery-action",
    "row-remap",
    "fabric",
    "event",
    "kernel-log",
    "inbox",
    "monitoring",
]

GROUPS = ("health",)
"""Settings whose names begin so stand in a section of that name in the file."""


def _key(name: str) -> str:
    """Where a field stands in the file: "health_hold_down_s" is "health.holdDownS"."""
    group, _, rest = name.partition("_")
    if group in GROUPS:
        return f"{group}.{_camel(rest)}"
    return _camel(name)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_key):
    """Everything that can be set. Paths are absolute, as this process sees them."""

    resource_name: Annotated[
        str,
        Meta(description="extended resource that Pods ask for", extra={"metavar": "NAME"}),
    ] = "vendor.example/gpu"
    device_plugin_dir: Annotated[
        str,
        Meta(
            description="the kubelet's device-plugin directory; it does not follow the"
            " kubelet's --root-dir",
            extra={"metavar": "DIR"},
        ),
    ] = "/var/lib/kubelet/device-plugins"
    pod_resources_socket: Annotated[
        str,
        Meta(
            description="the kubelet's pod-resources socket, asked which pod holds a device",
            extra={"metavar": "PATH"},
        ),
    ] = "/var/lib/kubelet/pod-resources/kubelet.sock"
    sysfs_root: Annotated[
        str, Meta(description="where the host's /sys is", extra={"metavar": "DIR"})
    ] = "/sys"
    dev_root: Annotated[
        str, Meta(description="where the host's /dev is", extra={"metavar": "DIR"})
    ] = "/dev"
    proc_root: Annotated[
        str, Meta(description="where the host's /proc is", extra={"metavar": "DIR"})
    ] = "/proc"
    driver_root: Annotated[
        str,
        Meta(
            description="root of the driver installation; libnvidia-ml.so.1 is looked for"
            " there first",
            extra={"metavar": "DIR"},
        ),
    ] = "/"
    node_name: Annotated[
        str | None,
        Meta(
            description="name of this node, for logs; NODE_NAME sets it too",
            extra={"metavar": "NAME"},
        ),
    ] = None
    pod_name: Annotated[
        str | None,
        Meta(
            description="name of this pod, for another plugin that waits for it to end;"
            " POD_NAME sets it too; unset: the host name",
            extra={"metavar": "NAME"},
        ),
    ] = None
    state_dir: Annotated[
        str,
        Meta(
            description="directory of what outlives the process and of the control socket;"
            " made if absent",
            extra={"metavar": "DIR"},
        ),
    ] = "/var/lib/deviceplugin"
    metrics_address: Annotated[
        str,
        Meta(
            description="address of /metrics, /healthz and /readyz; port 0 picks one and logs"
            " it, empty turns it off",
            extra={"metavar": "HOST:PORT"},
        ),
    ] = "0.0.0.0:9451"  # a scraper on another node has to reach it
    poll_interval_s: Annotated[
        float,
        Meta(
            description="seconds between two looks at the state of each GPU (0.1 to 3600)",
            extra={"metavar": "SECONDS"},
        ),
    ] = 5.0
    monitoring_lost_after_s: Annotated[
        float,
        Meta(
            description="seconds without an answer of the driver after which monitoring counts as"
            " lost (0.1 to 3600)",
            extra={"metavar": "SECONDS"},
        ),
    ] = 120.0
    on_monitoring_lost: Annotated[
        MonitoringLost,
        Meta(
            description="what follows: report it and go on offering the GPUs, or turn them"
            " unhealthy until the driver answers"
        ),
    ] = "report"
    health_mode: Annotated[
        HealthMode,
        Meta(
            description="observe: verdicts are shown, logged and counted, and withdraw no GPU;"
            " what operators ask for still does"
        ),
    ] = "enforce"
    health_observe: Annotated[
        tuple[HealthSource, ...],
        Meta(
            description="sources of verdicts that are only observed", extra={"metavar": "SOURCE,…"}
        ),
    ] = ()
    health_hold_down_s: Annotated[
        float,
        Meta(
            description="seconds that a GPU has to be well before it is offered again; doubled"
            " at each relapse (0 to 3600)",
            extra={"metavar": "SECONDS", "least": 0.0},
        ),
    ] = 60.0
    health_max_unhealthy: Annotated[
        int | None,
        Meta(
            description="GPUs that are withdrawn at most within ten minutes, those off the bus,"
            " without fabric or withdrawn by operators not counted; unset: half of the node's",
            extra={"metavar": "NUMBER"},
        ),
    ] = None
    health_xids: Annotated[
        dict[str, XidEffect],
        Meta(
            description="what single Xid codes do: ignore, report or unhealthy;"
            " 'deviceplugin xid CODE' tells what they do else",
            extra={"metavar": "CODE=EFFECT,…"},
        ),
    ] = msgspec.field(default_factory=dict)
    health_unknown_xids: Annotated[
        XidEffect, Meta(description="what an Xid does that the vendor's catalog does not have")
    ] = "report"
    health_kernel_log: Annotated[
        Literal["off", "on"],
        Meta(
            description="hear Xid errors from the kernel's log, too: needs kmsg in dev-root and"
            " the right to read it"
        ),
    ] = "off"
    health_check_before_start: Annotated[
        bool,
        Meta(
            description="refuse to start, or to start again, a container on a GPU that is"
            " unhealthy, so that a crash loop on it ends"
        ),
    ] = False
    require_gpu: Annotated[
        bool,
        Meta(description="not ready while there is no driver or no GPU; else a node without is"),
    ] = False
    log_format: Annotated[
        LogFormat | None,
        Meta(description="text or json; unset: text on a terminal, json otherwise"),
    ] = None
    log_level: Annotated[LogLevel, Meta(description="lowest level that is logged")] = "info"
    simulate: Annotated[
        str | None,
        Meta(
            description="publish simulated GPUs: the name of a shipped profile or the path of"
            " one's own",
            extra={"metavar": "PROFILE"},
        ),
    ] = None
    simulate_control: Annotated[
        str | None,
        Meta(
            description="FIFO that takes lines which change simulated GPUs; made if absent",
            extra={"metavar": "FIFO"},
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Field:
    """One setting's names and texts, for flags, help and docs.

    Attributes:
        choices: the only values allowed, in a list or table of such, too; () when any
            is. A switch has none: its default is a bool.
        least: the smallest number of seconds, for those that are.
    """

    name: str
    key: str
    flag: str
    envs: tuple[str, ...]
    metavar: str
    description: str
    choices: tuple[str, ...]
    default: Any
    least: float

    @property
    def shown_default(self) -> str:
        """The default as the file would say it; "" when there is none."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "" if self.default in (None, (), {}) else str(self.default)


_OTHER_VARIABLES = {"node_name": ("NODE_NAME",), "pod_name": ("POD_NAME",)}
"""Variables that pods are commonly given."""


def _fields() -> Iterator[Field]:
    hints = get_type_hints(Settings, include_extras=True)
    for field in msgspec.structs.fields(Settings):
        inner, meta = hints[field.name].__origin__, hints[field.name].__metadata__[0]
        choices = tuple(_literals(inner))
        stem = field.name.removesuffix("_s")
        env = ENV_PREFIX + stem.upper()
        yield Field(
            name=field.name,
            key=field.encode_name,
            flag="--" + stem.replace("_", "-"),
            envs=(env, *_OTHER_VARIABLES.get(field.name, ())),
            metavar=(meta.extra or {}).get("metavar", "|".join(choices or ("true", "false"))),
            description=meta.description,
            choices=choices,
            default={} if field.default is msgspec.NODEFAULT else field.default,
            least=(meta.extra or {}).get("least", 0.1),
        )


def _literals(of: Any) -> Iterator[str]:
    """The words that a type allows, at whatever depth."""
    for arg in getattr(of, "__args__", ()):
        if isinstance(arg, str):
            yield arg
        else:
            yield from _literals(arg)


FIELDS: tuple[Field, ...] = tuple(_fields())
"""Every setting, in the order of ``--help``."""


def json_schema() -> dict[str, Any]:
    """The JSON schema of the configuration file."""
    settings = msgspec.json.schema(Settings)["$defs"]["Settings"]
    properties: dict[str, Any] = {"version": {"const": FILE_VERSION}}
    for key, value in settings["properties"].items():
        group, dot, rest = key.partition(".")
        if not dot:
            properties[key] = value
            continue
        section = properties.setdefault(
            group, {"type": "object", "properties": {}, "additionalProperties": False}
        )
        section["properties"][rest] = value
    return {
        **settings,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "deviceplugin configuration",
        "properties": properties,
        "required": ["version"],
    }


def flatten(body: Mapping[str, Any]) -> dict[str, Any]:
    """A file's content with its sections' keys as "section.key"."""
    flat: dict[str, Any] = {}
    for key, value in body.items():
        if key in GROUPS and isinstance(value, dict):
            flat |= {f"{key}.{rest}": each for rest, each in value.items()}
        else:
            flat[key] = value
    return flat


def socket_stem(resource: str) -> str:
    """The start of the file names of a resource's sockets: "vendor.example_gpu".

    At most 32 characters, distinct for distinct resources.
    """
    stem = resource.replace("/", "_")
    if len(stem) <= 32:
        return stem
    return stem[:23] + "-" + hashlib.sha256(resource.encode()).hexdigest()[:8]


SOCKET_SUFFIX_LENGTH = len(".0123abcd.sock")
CONTROL_SOCKET = "control.sock"
