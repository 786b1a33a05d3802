"""The table of docs/simulation.md, made of the figures in tests/results/simulation.json.

python -m tests.simulation --seeds 5000 --json --setup stock >stock.json
python -m tests.simulation --seeds 5000 --json --setup patched --bundle DIR >patched.json
python -m tests.simulation.report stock.json patched.json
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BEGIN = "## What the worlds came to"
"""The page's last heading; all after it is written here."""


def small(run: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run: by release, how many worlds there were, how many were wrong, and how many by kind."""
    rows = run["releases"].values()
    kinds = sorted({kind for row in rows for kind in row["broken"]})
    kinds += sorted({note for row in rows for note in row["notes"] if note.startswith("load deadlock: ")})
    counts = {
        release: [
            row["worlds"],
            row["failed"],
            *(row["broken"].get(kind, row["notes"].get(kind, 0)) for kind in kinds),
        ]
        for release, row in run["releases"].items()
    }
    return {key: run[key] for key in ("setup", "date", "revision", "machine", "seeds")} | {
        "kinds": kinds,
        "releases": counts,
    }


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """How many worlds broke each invariant, and how many loads stood still by which shape: a row a setup and release.

    Releases that follow one another and came to the same share a row.
    """
    kinds = sorted({kind for run in runs for kind in run["kinds"]}, key=lambda kind: ("deadlock" in kind, kind))
    lines = [
        "| setup | release | worlds | wrong | " + " | ".join(kinds) + " |",
        "|---|---|---|---|" + "---|" * len(kinds),
    ]
    for run in runs:
        for (worlds, wrong, *found), alike in itertools.groupby(run["releases"], key=run["releases"].get):
            releases, of = list(alike), dict(zip(run["kinds"], found, strict=True))
            named = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
            counts = [worlds, wrong, *(of.get(kind, 0) for kind in kinds)]
            lines.append(f"| {run['setup']} | {named} | {' | '.join(map(str, counts))} |")
    lines += ["", f"{'; '.join(map(_made, runs))}."]
    return "\n".join(lines)


def _made(run: Mapping[str, Any]) -> str:
    machine = run["machine"] or "the machine was not recorded"
    return f"{run['setup']}: {run['date']}, revision {run['revision']}, {machine}"


def write(files: Sequence[str], root: Path = ROOT) -> None:
    """Keep the figures, and put their table where the page says that it stands."""
    runs: list[Mapping[str, Any]] = []
    for name in files:
        kept = json.loads(Path(name).read_text(encoding="utf-8"))
        runs += kept if isinstance(kept, list) else [small(kept)]  # what the page has already, too
    (root / "tests/results/simulation.json").write_text(json.dumps(runs) + "\n", encoding="utf-8")
    page = root / "docs/simulation.md"
    text, begin, _ = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{text}{begin or BEGIN}\n\n{table(runs)}\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
