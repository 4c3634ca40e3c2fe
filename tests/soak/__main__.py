"""``make soak``: a storm, a run of plugin kills, and long outages of the kubelet.

The seed is printed; ``--seed`` repeats a run's order of events.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable
from typing import Final

from tests.soak import Failed
from tests.soak.kills import kills
from tests.soak.outages import outages
from tests.soak.storm import soak

RUNS: Final[dict[str, Callable[[float, int], dict[str, object]]]] = {
    "storm": soak,
    "kills": kills,
    "outages": outages,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each run")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--run", choices=RUNS, action="append", help="this one alone")
    arguments = parser.parse_args()
    for name in arguments.run or RUNS:
        print(f"{name}, seed {arguments.seed}", flush=True)  # noqa: T201  # to repeat it
        try:
            for what, value in RUNS[name](arguments.seconds, arguments.seed).items():
                print(f"  {what:20} {value}", flush=True)  # noqa: T201  # the result
        except Failed as failure:
            print(f"FAILED: {failure}", file=sys.stderr)  # noqa: T201  # the result
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
