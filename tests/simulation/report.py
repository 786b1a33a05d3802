"""The table of docs/simulation.md, made of the figures in docs/simulation.json.

python -m tests.simulation --seeds 5000 --json --arm stock >stock.json
python -m tests.simulation --seeds 5000 --json --arm patched --bundle DIR >patched.json
python -m tests.simulation.report stock.json patched.json >table.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(runs: Sequence[dict[str, Any]]) -> str:
    """For each arm and release: how many worlds broke each invariant."""
    kinds = sorted({kind for run in runs for row in run["releases"].values() for kind in row["broken"]})
    lines = [
        "| arm | release | worlds | wrong | " + " | ".join(kinds) + " |",
        "|---|---|---|---|" + "---|" * len(kinds),
    ]
    for run in runs:
        for release, row in run["releases"].items():
            counts = " | ".join(str(row["broken"].get(kind, 0)) for kind in kinds)
            lines.append(f"| {run['arm']} | {release} | {row['worlds']} | {row['failed']} | {counts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]))
