"""A machine with a fake driver, for whole daemons."""

from __future__ import annotations

from pathlib import Path

from tests import fakenvml
from tests.daemon import Daemon, Node
from tests.fakenvml import FakeNode


class Machine:
    """A fake driver with its files, and the flags that point the daemon there."""

    def __init__(self, directory: Path, library: Path, gpus: FakeNode) -> None:
        self.gpus = gpus
        fakenvml.write_sysfs(
            directory / "sys",
            {gpu.sysfs_id: number // 4 for number, gpu in gpus.gpus.items()},
            {0: "0-15", 1: "16-31"},
        )
        fakenvml.write_dev(directory / "dev", gpus.gpus)
        self.env = gpus.env()
        self.flags: tuple[str, ...] = (
            *("--driver-root", str(library.parent)),
            *("--sysfs-root", str(directory / "sys")),
            *("--dev-root", str(directory / "dev")),
            *("--proc-root", str(directory / "proc")),
            *("--poll-interval", "0.1"),
        )

    def start(self, node: Node, *flags: str) -> Daemon:
        return node.start(*self.flags, *flags, env=self.env)

    def id(self, number: int) -> str:
        return self.gpus.gpus[number].uuid
