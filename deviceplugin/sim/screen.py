"""What the demo shows: coloured on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from deviceplugin import terminal


class Screen:
    """Numbered steps, their results and a summary."""

    def __init__(self) -> None:
        self._rich = sys.stdout.isatty()
        self._console = Console(highlight=False)
        self._steps = 0

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A step: its title first, then what it shows."""
        self._steps += 1
        self._say(f"\n{self._steps}. {title}", "bold cyan")
        yield

    def result(self, text: str) -> None:
        """Something that held."""
        self._say(f"   ✓ {text}", "green")

    def detail(self, text: str) -> None:
        """More about the last result."""
        self._say(f"     {text}", "dim")

    def failed(self, text: str) -> None:
        """Something that did not hold."""
        self._say(f"   ✗ {text}", "bold red")

    def text(self, text: str) -> None:
        """A line of its own."""
        self._say(text, "")

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns."""
        terminal.show(headings, rows, indent="   ")

    def summary(self, text: str, figures: Sequence[tuple[str, str]]) -> None:
        """The end: one sentence and the figures."""
        self._say(f"\n{text}", "bold green")
        width = max(len(name) for name, _ in figures)
        for name, value in figures:
            self._say(f"   {name.ljust(width)}  {value}", "")

    def _say(self, text: str, style: str) -> None:
        if self._rich:
            # The terminal wraps: a line of ours with breaks in it could not be copied.
            self._console.print(Text(text, style=style), soft_wrap=True)
        else:
            print(text, flush=True)
