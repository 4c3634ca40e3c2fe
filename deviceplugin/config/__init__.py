"""The settings: one frozen value, from defaults, a file, the environment and flags.

``Settings`` is the only list of settings there is; flags, environment names,
file keys, ``--help`` and the JSON schema are derived from its fields. Parsing
is pure (text in, value out) and reports every mistake at once, each naming
the key and where it was set. Precedence: flag, environment, file, default.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deviceplugin.config import file as config_file
from deviceplugin.config.checks import check, check_plugin_dir, check_resource_name, parse_address
from deviceplugin.config.settings import (
    CONTROL_SOCKET,
    ENV_PREFIX,
    FIELDS,
    FILE_VERSION,
    Field,
    Settings,
    json_schema,
    socket_stem,
)
from deviceplugin.errors import ConfigError

__all__ = [
    "CONTROL_SOCKET",
    "ENV_PREFIX",
    "FIELDS",
    "FILE_VERSION",
    "Field",
    "Loaded",
    "Settings",
    "check_resource_name",
    "json_schema",
    "load",
    "parse_address",
    "socket_stem",
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and where each came from.

    Attributes:
        origins: per field name: "default", "file /etc/…", "environment X" or "flag --x".
        warnings: sentences about what was ignored.
    """

    settings: Settings
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def load(
    flags: Mapping[str, str],
    env: Mapping[str, str],
    file: tuple[str, str] | None = None,
) -> Loaded:
    """Merge and check.

    Args:
        flags: field name to text, for the flags that were given.
        env: the whole environment.
        file: name and content of the configuration file, YAML or JSON.

    Raises:
        ConfigError: with every mistake.
    """
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    origins = {field.name: "default" for field in FIELDS}
    if file is not None:
        name, text = file
        from_file = config_file.parse(name, text, mistakes)
        for field in FIELDS:
            if field.key in from_file:
                values[field.name] = from_file[field.key]
                origins[field.name] = f"file {name}"
    for field in FIELDS:
        for variable in field.envs:
            if variable in env:
                values[field.name] = _from_text(field, env[variable])
                origins[field.name] = f"environment {variable}"
                break
        if field.name in flags:
            values[field.name] = _from_text(field, flags[field.name])
            origins[field.name] = f"flag {field.flag}"
    for field in FIELDS:
        if field.name in values:
            mistakes += (
                f"{origins[field.name]}: {field.key}: {text}"
                for text in check(field, values[field.name])
            )
    merged = {field.name: field.default for field in FIELDS} | values
    directory, resource = merged["device_plugin_dir"], merged["resource_name"]
    if isinstance(directory, str) and isinstance(resource, str):
        mistakes += (
            f"{origins['device_plugin_dir']}: devicePluginDir: {text}"
            for text in check_plugin_dir(directory, resource)
        )
    if merged["simulate_control"] is not None and merged["simulate"] is None:
        mistakes.append(
            f"{origins['simulate_control']}: simulateControl: changes simulated GPUs only:"
            " set simulate too, or remove it"
        )
    if mistakes:
        raise ConfigError(mistakes)
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    return Loaded(Settings(**values), origins, tuple(_unknown_variables(env)))


def _from_text(field: Field, text: str) -> Any:
    if isinstance(field.default, dict):
        pairs = (item.partition("=") for item in text.split(",") if item)
        return {key.strip(): value.strip() for key, _, value in pairs}
    if isinstance(field.default, tuple):
        return [item.strip() for item in text.split(",") if item.strip()]
    if field.name == "health_max_unhealthy":
        return int(text) if text.isascii() and text.isdigit() else (text or None)
    if isinstance(field.default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(field.default, float):
        try:
            return float(text)
        except ValueError:
            return text  # _check names it
    if field.default is None and text == "":
        return None
    return text


def _unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    """A misspelt variable is said, not refused: a Service called "deviceplugin"
    makes the kubelet set variables with our prefix (…_SERVICE_HOST, …_PORT)."""
    known = {variable for field in FIELDS for variable in field.envs} | {ENV_PREFIX + "CONFIG"}
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable in known:
            continue
        if re.search(r"_(SERVICE_HOST|SERVICE_PORT|PORT)(_|$)", variable):
            continue
        close = difflib.get_close_matches(variable, known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield f"environment {variable}: no such setting, ignored{hint}"
