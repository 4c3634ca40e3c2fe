"""Tables for people: coloured on a terminal, plain columns in a pipe.

Loads ``rich`` only for a terminal. The daemon never comes here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

STYLES = {"Healthy": "green", "Unhealthy": "bold red", "not": "bold red"}
"""By the first word of a cell."""


def show(headings: Sequence[str], table: Sequence[Sequence[str]], indent: str = "") -> None:
    """Print a table to stdout."""
    if not sys.stdout.isatty():
        for row in plain(headings, table).splitlines():
            print(f"{indent}{row}")  # noqa: T201  # that is what it is for
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        # An id that is cut or broken cannot be copied.
        shown.add_column(heading, overflow="fold", no_wrap=heading == "ID")
    for line in table:
        shown.add_row(*(Text(cell, STYLES.get(cell.partition(" ")[0], "")) for cell in line))
    Console().print(Padding(shown, (0, 0, 0, len(indent))))


def plain(headings: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """Columns for a pipe: nothing is cut, nothing is coloured."""
    lines = [headings, *table]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
