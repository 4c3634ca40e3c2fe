"""The command line. Chooses real or simulated parts, and nothing else does.

Exit codes: 0 done or stopped, 2 wrong usage or configuration, 1 anything
else. What a command is asked for goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deviceplugin import __version__, config, healthcli
from deviceplugin.errors import ConfigError, DevicePluginError, HardwareError, ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deviceplugin.hardware import Hardware, Host


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    _have_standard_files()
    # gRPC's own log is no use to an operator; whoever debugs it can still ask for it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except (ConfigError, ProfileError) as error:
        what = "configuration" if isinstance(error, ConfigError) else "simulation profile"
        print(f"deviceplugin: the {what} is wrong:", file=sys.stderr)
        for mistake in error.mistakes:
            print(f"  - {mistake}", file=sys.stderr)
        return 2
    except DevicePluginError as error:
        print(f"deviceplugin: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output is gone, as in "inspect | head".
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _have_standard_files() -> None:
    """Whoever starts us without stdin, stdout or stderr would else see the next
    file that is opened, a socket say, written to as if it were one of them."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            mode = "r" if descriptor == 0 else "w"
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


# --- arguments ----------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deviceplugin", description="A Kubernetes device plugin for GPUs."
    )
    parser.add_argument("--version", action="version", version=f"deviceplugin {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    settings = _settings_parser()
    run = commands.add_parser(
        "run", parents=[settings], help="the daemon: publish this node's GPUs to the kubelet"
    )
    run.set_defaults(command=_run)
    look = commands.add_parser(
        "inspect", parents=[settings], help="print what would be published, and why"
    )
    look.add_argument("--json", action="store_true", help="print one JSON object")
    look.set_defaults(command=_inspect)
    status = commands.add_parser(
        "status", parents=[settings], help="ask the running daemon how it is"
    )
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(command=_status)
    forget = commands.add_parser(
        "forget", parents=[settings], help="tell the running daemon that an absent GPU stays away"
    )
    forget.add_argument("device", metavar="DEVICE", help="its id, as 'status' shows it")
    forget.set_defaults(command=_forget)
    maintenance = commands.add_parser(
        "maintenance",
        help="withdraw GPUs and let go of them, for a reset or a new partition, and give them back",
    )
    actions = maintenance.add_subparsers(metavar="ACTION", required=True)
    start = actions.add_parser(
        "start",
        parents=[settings],
        help="withdraw GPUs: offered to no pod, and not opened by the plugin",
    )
    end = actions.add_parser(
        "end", parents=[settings], help="give GPUs back: looked at anew, and offered if well"
    )
    for action in (start, end):
        action.add_argument(
            "gpus", metavar="GPU", nargs="+", help="id, PCI bus id or index; or 'all' alone"
        )
    start.add_argument("--reason", default="", help="shown in 'status' and the log")
    start.set_defaults(command=_maintenance, action="start")
    end.set_defaults(command=_maintenance, action="end", reason="")
    healthcli.add_parsers(commands, settings, _load)
    demo = commands.add_parser(
        "demo", help="the plugin on simulated GPUs with an embedded kubelet, step by step"
    )
    demo.add_argument(
        "--profile", default="h100x8", help="simulation profile (default: %(default)s)"
    )
    demo.add_argument(
        "--keep", action="store_true", help="leave it running at the end, until Ctrl-C"
    )
    demo.set_defaults(command=_demo)
    return parser


def _settings_parser() -> argparse.ArgumentParser:
    """A flag for each setting. Texts only: config.load checks them all at once."""
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = parser.add_argument_group(
        "settings",
        "Each also as an environment variable and in the configuration file; a flag wins"
        " over the environment, the environment over the file.",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        help=f"configuration file, YAML or JSON ({config.ENV_PREFIX}CONFIG)",
    )
    for field in config.FIELDS:
        default = field.shown_default or "unset"
        text = f"{field.description} (default: {default}; {', '.join(field.envs)})"
        switch: dict[str, Any] = (
            {"nargs": "?", "const": "true"} if isinstance(field.default, bool) else {}
        )
        group.add_argument(
            field.flag,
            dest=field.name,
            metavar=field.metavar,
            help=text.replace("%", "%%"),
            **switch,
        )
    return parser


def _file(arguments: argparse.Namespace) -> Path | None:
    """The configuration file; None when none is named."""
    name = vars(arguments).get("config") or os.environ.get(config.ENV_PREFIX + "CONFIG")
    return Path(name) if name else None


def _load(arguments: argparse.Namespace) -> config.Loaded:
    given: dict[str, Any] = vars(arguments)
    path, file = _file(arguments), None
    if path is not None:
        try:
            file = str(path), path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError([f"file {path}: cannot be read: {error}"]) from error
    flags = {field.name: given[field.name] for field in config.FIELDS if field.name in given}
    return config.load(flags, os.environ, file)


def _load_whole(arguments: argparse.Namespace) -> config.Loaded:
    """The settings, and that the profile they name can be used."""
    loaded = _load(arguments)
    if loaded.settings.simulate is not None:
        from deviceplugin.sim import profile

        profile.load(loaded.settings.simulate)
    return loaded


def _parts(settings: config.Settings) -> tuple[Hardware, Host]:
    """The machine, or the simulated one."""
    if settings.simulate is not None:
        from deviceplugin.sim import gpus, profile

        loaded = profile.load(settings.simulate)
        return gpus.SimulatedHardware(loaded), gpus.SimulatedHost(loaded)
    from deviceplugin.hardware.child import ChildHardware
    from deviceplugin.hardware.sysfs import HostFiles

    hardware = ChildHardware(Path(settings.driver_root))
    with contextlib.suppress(HardwareError):  # the monitor tries again, and says why
        hardware.start()  # it loads while we do
    return (
        hardware,
        HostFiles(Path(settings.sysfs_root), Path(settings.dev_root), Path(settings.proc_root)),
    )


# --- commands -----------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    _exit_at_a_signal()
    loaded = _load(arguments)
    before: config.Loaded | None = None
    while True:
        try:
            code, next_one = _run_with(loaded, arguments)
        except DevicePluginError as error:
            if before is None:
                raise
            from deviceplugin import logs

            logs.get("config").error("new settings cannot be used, taking those before", why=error)
            loaded, before = before, None
            continue
        if next_one is None:
            return code
        loaded, before = next_one, loaded


def _exit_at_a_signal() -> None:
    """While there is no agent with handlers of its own; as process 1 of a container the
    kernel would ignore the signals else. A hangup asks for the settings to be read,
    which is being done just then."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    signal.signal(signal.SIGHUP, lambda *_: None)


def _run_with(
    loaded: config.Loaded, arguments: argparse.Namespace
) -> tuple[int, config.Loaded | None]:
    """The daemon from start to stop: its exit code, and the settings to begin anew with."""
    settings = loaded.settings
    hardware, host = _parts(settings)
    from deviceplugin import logs
    from deviceplugin.agent import Agent
    from deviceplugin.clock import SystemClock
    from deviceplugin.reload import Reloader

    logs.set_up(settings.log_format, settings.log_level)
    log = logs.get("config")
    for warning in loaded.warnings:
        log.warning("setting ignored", why=warning)
    reloader = Reloader(_file(arguments), lambda: _load_whole(arguments), loaded)
    agent = Agent(settings, hardware, host, SystemClock(), reloader)
    control = None
    if settings.simulate_control is not None:
        from deviceplugin.sim.gpus import SimulatedHardware
        from deviceplugin.sim.scenario import ControlFifo

        if not isinstance(hardware, SimulatedHardware):
            raise ConfigError(["simulateControl: set simulate too"])
        log = logs.get("simulation")
        control = ControlFifo(
            Path(settings.simulate_control),
            hardware,
            on_bad_line=lambda line, why: log.warning("control line ignored", line=line, why=why),
            on_command=lambda command: log.info("control line", command=command),
        )
        control.start()
    try:
        code = agent.run()
        _exit_at_a_signal()
    finally:
        if control is not None:
            control.stop()
    if agent.stuck:
        sys.stderr.flush()
        os._exit(code)  # a thread that hangs in the driver would keep the process
    return code, agent.next_settings


def _inspect(arguments: argparse.Namespace) -> int:
    settings = _load(arguments).settings
    hardware, host = _parts(settings)
    from deviceplugin import inspection, terminal
    from deviceplugin.clock import SystemClock

    snapshot = inspection.look(hardware, host, SystemClock())
    if arguments.json:
        print(json.dumps(inspection.as_json(snapshot, settings.resource_name), indent=2))
        return 0
    driver = snapshot.inventory.driver if snapshot.inventory is not None else None
    version = driver.driver_version if driver is not None else None
    print(f"{settings.resource_name}, driver {version or 'version unknown'}")
    for line in inspection.models(snapshot):
        print(line)
    print()
    terminal.show(inspection.HEADINGS, inspection.rows(snapshot))
    if len(snapshot.devices) > 1:
        print()
        terminal.show(inspection.link_headings(snapshot), inspection.link_rows(snapshot))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    settings = _load(arguments).settings
    from dataclasses import asdict

    from deviceplugin import control, standing, terminal
    from deviceplugin.hardware.host import process_usage

    status = control.ask(Path(settings.state_dir), "status")
    usage = process_usage(status["pid"])
    status["process"] = asdict(usage) if usage is not None else None
    if arguments.json:
        print(json.dumps(status, indent=2))
        return 0
    simulated = f", simulated {status['simulate']}" if status["simulate"] is not None else ""
    print(
        f"{status['resource']}: {status['phase']}, pid {status['pid']}, version"
        f" {status['version']}{simulated}"
    )
    for note in status["notes"][0 if status["ready"] else 1 :]:  # else the first is the line above
        print(f"  {note}")
    if usage is not None:
        print(
            f"  {usage.resident_bytes / 2**20:.0f} MiB, {usage.cpu_s:.1f} s of CPU in"
            f" {status['uptime_s']:.0f} s, {usage.threads} threads, {usage.open_files} open files"
        )
    if status["devices"]:
        terminal.show(standing.HEADINGS, standing.rows(status))
    for line in standing.details(status):
        print(line)
    return 0


def _forget(arguments: argparse.Namespace) -> int:
    settings = _load(arguments).settings
    from deviceplugin import control

    answer = control.ask(Path(settings.state_dir), "forget", device=arguments.device)
    if answer["refused"] is not None:
        print(f"deviceplugin: not forgotten: {answer['refused']}", file=sys.stderr)
        return 1
    print(f"{arguments.device} is forgotten")
    return 0


def _maintenance(arguments: argparse.Namespace) -> int:
    settings = _load(arguments).settings
    from deviceplugin import control

    action: str = arguments.action
    done = control.ask(
        Path(settings.state_dir),
        "maintenance",
        action=action,
        gpus=arguments.gpus,
        reason=arguments.reason,
    )
    if done["refused"]:
        for why in done["refused"]:
            print(f"deviceplugin: nothing done: {why}", file=sys.stderr)
        return 1
    for gpu in done["gpus"]:
        if action == "end":
            print(f"{gpu} is looked at again")
        elif gpu in done["held"]:
            print(f"{gpu} is withdrawn; {done['held'][gpu]} holds it and runs on")
        else:
            print(f"{gpu} is withdrawn")
    if not done["saved"]:
        print("deviceplugin: not saved: a restart of the plugin forgets this", file=sys.stderr)
    if action == "start" and not done["let_go"]:
        print(
            "deviceplugin: a driver call hangs and cannot be ended: a process of the plugin still"
            " has the driver open",
            file=sys.stderr,
        )
        return 1
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from deviceplugin.sim import demo

    return demo.run(arguments.profile, keep=arguments.keep)
