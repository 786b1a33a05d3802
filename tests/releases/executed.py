"""The record of what a run of the release tests executed, and what is kept of it for the matrix.

Each driver's run leaves a line: the test, the releases, and the patches that its process reports as applied. A patch's
cell is executed on stock where a test that names the patch ran that release without it, and patched where one ran it
with it. `needed` takes both; where the release is to be left alone, the run without it shows that.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.commands.matrix import Matrix
from vllm_livepatch.tools.upkeep import newrelease

VARIABLE = "LIVEPATCH_TEST_RECORD"
"""Names the directory of the record, for the workers of one test run."""
ROOT = Path(__file__).parents[2]
HEAD = "# The releases on which the release tests executed each patch: pytest tests/releases --keep-record\n\n"

Record = dict[str, dict[tuple[str, str], set[str]]]
"""By patch and (package, release): "stock", "patched", or both."""


def note(driver: str, releases: Mapping[str, str], state: Path | None) -> None:
    """Leave a line of one driver's run, whose reports are in `state`; None where it had no bundle."""
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    applied = set()
    for file in state.glob("*.json") if state is not None else ():
        patches = json.loads(file.read_text(encoding="utf-8"))["patches"]
        applied |= {patch["name"] for patch in patches if patch["state"] == "applied"}
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    line = {"file": test, "driver": driver, "releases": dict(releases), "applied": sorted(applied)}
    with Path(place, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as record:
        record.write(json.dumps(line) + "\n")


def gathered(lines: Iterable[Mapping[str, Any]], about: Mapping[str, Iterable[str]]) -> Record:
    """The record of lines; `about` has the patches that each file of tests names."""
    record: Record = defaultdict(lambda: defaultdict(set))
    for line in lines:
        for patch in about.get(line["file"], ()):
            mode = "patched" if patch in line["applied"] else "stock"
            for release in line["releases"].items():
                record[patch][release].add(mode)
    return record


def read(place: Path) -> Record:
    """What the workers of a test run left."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(place.glob("*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return gathered(lines, {file: newrelease.patches_of(ROOT / file) for file in {line["file"] for line in lines}})


def fully(matrix: Matrix, record: Record) -> dict[str, dict[str, list[str]]]:
    """The releases on which each patch was executed as its cell's verdict asks for, by patch and package."""
    found: dict[str, dict[str, list[str]]] = {}
    for patch, row in matrix.cells.items():
        for release, cell in row.items():
            wanted = {"stock", "patched"} if cell.verdict == "needed" else {"stock"}
            if wanted <= record.get(patch, {}).get(release, set()):
                found.setdefault(patch, {}).setdefault(release[0], []).append(release[1])
    return found


def overclaimed(kept: Mapping[str, Mapping[str, list[str]]], ran: Mapping[str, Mapping[str, list[str]]]) -> list[str]:
    """What is kept as executed, and was not run."""
    return [
        f"{patch} on {package}=={release}"
        for patch, packages in kept.items()
        for package, releases in packages.items()
        for release in releases
        if release not in ran.get(patch, {}).get(package, ())
    ]
