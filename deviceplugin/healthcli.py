"""``deviceplugin health`` and ``xid``: what is wrong with the GPUs, and the operator's word."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deviceplugin import config

Load = Callable[[argparse.Namespace], config.Loaded]

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parsers(commands: Any, settings: argparse.ArgumentParser, load: Load) -> None:
    """Add the commands.

    Args:
        commands: the subparsers of the command line.
        settings: a parent parser with a flag for each setting.
        load: the settings that a command line asks for.
    """
    parser = commands.add_parser(
        "health", parents=[settings], help="what is wrong with the GPUs; the operator's word"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.set_defaults(command=lambda arguments: _show(arguments, load))
    actions = parser.add_subparsers(metavar="ACTION", title="actions", description="none: a table")
    word = actions.add_parser("set", parents=[settings], help="say how GPUs are")
    word.add_argument("gpus", metavar="GPU", nargs="+", help="id, PCI bus id or index; or 'all'")
    word.add_argument("verdict", choices=("healthy", "unhealthy"))
    word.add_argument("--reason", default="", help="shown in 'status' and the log")
    word.add_argument(
        "--for",
        dest="for_s",
        type=_duration_s,
        metavar="TIME",
        help="as in 30m, 2h or 1d. Unhealthy: until then, else until 'health clear'."
        " Healthy: nothing that is heard until then withdraws it; else what is known against"
        " it is dropped, and new faults count",
    )
    word.set_defaults(command=lambda arguments: _say(arguments, load))
    clear = actions.add_parser("clear", parents=[settings], help="take such a word back")
    clear.add_argument("gpus", metavar="GPU", nargs="+", help="id, PCI bus id or index; or 'all'")
    clear.set_defaults(
        command=lambda arguments: _say(arguments, load), verdict="clear", reason="", for_s=None
    )
    history = actions.add_parser(
        "history", parents=[settings], help="faults of before, reboots included"
    )
    history.add_argument("gpus", metavar="GPU", nargs="*", help="ids; none: all")
    history.add_argument("--json", action="store_true", help="print one JSON array")
    history.set_defaults(command=lambda arguments: _history(arguments, load))
    xid = commands.add_parser(
        "xid", parents=[settings], help="what an Xid error code means and does"
    )
    xid.add_argument("code", type=int, metavar="CODE")
    xid.set_defaults(command=lambda arguments: _xid(arguments, load))


def _duration_s(text: str) -> float:
    """Seconds of "90s", "30m", "2h" or "1d"."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", text)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90s, 30m, 2h or 1d")
    return float(found[1]) * _UNITS_S[found[2]]


def _ask(arguments: argparse.Namespace, load: Load, command: str, **fields: Any) -> Any:
    from deviceplugin import control

    return control.ask(Path(load(arguments).settings.state_dir), command, **fields)


def _show(arguments: argparse.Namespace, load: Load) -> int:
    from deviceplugin import standing, terminal

    status = _ask(arguments, load, "status")
    if arguments.json:
        print(json.dumps(status["devices"], indent=2))
        return 0
    devices = status["devices"]
    terminal.show(
        ("GPU", "ID", "HEALTH"),
        [(_index(device), device["id"], standing.health_words(device)) for device in devices],
    )
    told = [row for device in devices if set(row := _told(device)) != {"-"}]
    if told:
        print()
        terminal.show(
            ("GPU", "RECOVERY ACTION", "ROW REMAP", "FABRIC", "ERRORS", "THROTTLED BY"),
            [(_index(device), *_told(device)) for device in devices],
        )
    details = standing.details(status)
    if details:
        print()
    for line in details:
        print(line)
    return 0


def _index(device: Mapping[str, Any]) -> str:
    return str(device["index"]) if device["index"] >= 0 else "-"


def _told(device: Mapping[str, Any]) -> tuple[str, ...]:
    """What the driver tells of a GPU's condition."""
    remap = {None: "-", True: "pending", False: "none"}[device["row_remap_pending"]]
    errors = device["uncorrected_errors"]
    return (
        device["recovery_action"] or "-",
        "failed" if device["row_remap_failed"] else remap,
        device["fabric"] or "-",
        "-" if errors is None else str(errors),
        "-" if device["throttled_by"] is None else ", ".join(device["throttled_by"]) or "nothing",
    )


def _say(arguments: argparse.Namespace, load: Load) -> int:
    done = _ask(
        arguments,
        load,
        "say",
        gpus=arguments.gpus,
        verdict=arguments.verdict,
        reason=arguments.reason,
        for_s=arguments.for_s,
    )
    if done["refused"]:
        for why in done["refused"]:
            print(f"deviceplugin: nothing done: {why}", file=sys.stderr)
        return 1
    what = {
        "healthy": "is taken for healthy",
        "unhealthy": "is withdrawn",
        "clear": "is judged by what is heard of it",
    }[arguments.verdict]
    for gpu in done["gpus"]:
        print(f"{gpu} {what}")
    if not done["saved"]:
        print("deviceplugin: not saved: a restart of the plugin forgets this", file=sys.stderr)
    return 0


def _history(arguments: argparse.Namespace, load: Load) -> int:
    from deviceplugin import terminal

    entries = _ask(arguments, load, "history", gpus=arguments.gpus)
    if arguments.json:
        print(json.dumps(entries, indent=2))
        return 0
    if not entries:
        print("nothing has happened")
        return 0
    terminal.show(
        ("TIME (UTC)", "ID", "FROM", "TO", "WHY"),
        [
            (
                f"{datetime.fromtimestamp(entry['time_s'], UTC):%Y-%m-%d %H:%M:%S}",
                entry["gpu"],
                entry["was"],
                entry["now"],
                "; ".join(filter(None, (entry["detail"], entry["held"]))),
            )
            for entry in entries
        ],
    )
    return 0


def _xid(arguments: argparse.Namespace, load: Load) -> int:
    from deviceplugin.health import Effect, Policy, lookup

    policy = Policy.of(load(arguments).settings)
    known, effect = lookup(arguments.code), policy.effect(arguments.code)
    print(f"Xid {known.code}: {known.text} ({known.kind})")
    if known.kind != "unknown":
        print(f"  the vendor's catalog says: {known.action or 'nothing'}")
    print(f"  effect: {_EFFECTS[effect.name]}")
    if effect is not known.effect:
        print(f"  because of a setting; else: {known.effect.value}")
    elif known.why:
        print(f"  why: {known.why}")
    if effect is Effect.UNHEALTHY:
        print(f"  ends with: {known.cure.value}")
    return 0


_EFFECTS = {
    "IGNORE": "counted; the GPU stays healthy",
    "REPORT": "counted and logged; the GPU stays healthy",
    "UNHEALTHY": "the GPU is withdrawn",
    "ASK": "the driver is asked whether the GPU needs anything, and decides",
}
