"""The record of what a run of the release tests executed, and what is kept of it for the matrix.

Each driver's run leaves a line: the test, the releases, and the patches that its process reports as applied. A patch's
cell is executed on stock where a test that names the patch ran that release without it, and patched where one ran it
with it. `needed` takes both; where the release is to be left alone, the run without it shows that.

CI runs some files on one release of each form of the code. LIVEPATCH_TEST_RELEASES=all (or names of releases) runs them
on the others, by hand: `--keep-record` then keeps what CI does not run, with date, revision and the patch's code.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version
from vllm_livepatch.tools.commands.matrix import Matrix, Run
from vllm_livepatch.tools.upkeep import newrelease

VARIABLE = "LIVEPATCH_TEST_RECORD"
"""Names the directory of the record, for the workers of one test run."""
SELECTION = "LIVEPATCH_TEST_RELEASES"
"""Set where releases are run by hand."""
ROOT = Path(__file__).parents[2]
HEAD = "# The releases on which the release tests executed each patch: pytest tests/releases --keep-record\n\n"
HEAD_BY_HAND = (
    "# What CI leaves out and was run by hand, with which code of the patch:\n"
    "# LIVEPATCH_TEST_RELEASES=all pytest tests/releases/test_NAME.py --keep-record\n\n"
)

Record = dict[str, dict[tuple[str, str], set[str]]]
"""By patch and (package, release): "stock", "patched", or both."""


def chosen(in_ci: Sequence[str], every: Iterable[str]) -> list[str]:
    """The releases to run a test on: `in_ci`, or by hand those of all in which the fault can be driven that are asked for."""
    asked = os.environ.get(SELECTION)
    if asked is None:
        return list(in_ci)
    return [release for release in every if asked == "all" or release in asked.split(",")]


def some(every: Sequence[str]) -> list[str]:
    """The releases to run a test on that takes long: in CI the first of these, and every sixth back from the last."""
    return chosen(sorted({every[0], *every[::-6]}, key=every.index), every)


def by_hand() -> bool:
    """Whether releases were asked for by hand."""
    return SELECTION in os.environ


def note(driver: str, releases: Mapping[str, str], state: Path | None, with_stock: bool = False) -> None:
    """Leave a line of one driver's run, whose reports are in `state`; None where it had no bundle.

    `with_stock`: its process plays the release's own code too, unwrapped.
    """
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    applied = set()
    for file in state.glob("*.json") if state is not None else ():
        patches = json.loads(file.read_text(encoding="utf-8"))["patches"]
        applied |= {patch["name"] for patch in patches if patch["state"] == "applied"}
    test, _, case = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")
    line: dict[str, Any] = {"file": test, "case": case.partition(" (")[0], "driver": driver}
    line |= {"releases": dict(releases), "applied": sorted(applied)}
    if with_stock:
        line["with_stock"] = True
    with Path(place, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as record:
        record.write(json.dumps(line) + "\n")


def gathered(lines: Iterable[Mapping[str, Any]], about: Mapping[str, Iterable[str]]) -> Record:
    """The record of lines; `about` has the patches that each file of tests names."""
    record: Record = defaultdict(lambda: defaultdict(set))
    for line in lines:
        for patch in about.get(line["file"], ()):
            modes = {"patched" if patch in line["applied"] else "stock", *(["stock"] if line.get("with_stock") else [])}
            for release in line["releases"].items():
                record[patch][release] |= modes
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


def both(
    kept: Mapping[str, Mapping[str, Collection[str]]], ran: Mapping[str, Mapping[str, Collection[str]]]
) -> dict[str, dict[str, list[str]]]:
    """What is kept, and what was run."""
    return {
        patch: {
            package: sorted({*kept.get(patch, {}).get(package, ()), *ran.get(patch, {}).get(package, ())}, key=Version)
            for package in sorted({*kept.get(patch, {}), *ran.get(patch, {})}, reverse=True)
        }
        for patch in sorted({*kept, *ran})
    }


def revision() -> str:
    """The commit of what is run; `-dirty` where something of it is not committed."""

    def answer(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    rooms = ["patches", "sitecustomize", "tests/releases", "tests/standins"]
    dirty = "-dirty" if answer("status", "--porcelain", "--", *rooms).strip() else ""
    return f"{answer('rev-parse', '--short', 'HEAD').strip()}{dirty}"


def with_runs(
    kept: Mapping[str, Sequence[Run]],
    ran: Mapping[str, Mapping[str, Collection[str]]],
    in_ci: Mapping[str, Mapping[str, Collection[str]]],
    code: Mapping[str, str],
    where: str,
) -> dict[str, list[Run]]:
    """What is kept of runs by hand, after one more of revision `where`: the newest of each release that CI leaves out."""
    runs: dict[str, list[Run]] = {}
    for name in sorted({*kept, *ran} & {*code}):
        now: Run = {"code": code[name], "date": time.strftime("%Y-%m-%d"), "revision": where, "releases": {}}
        now["releases"] = {package: [*found] for package, found in ran.get(name, {}).items()}
        earlier = [_without(run, now["releases"]) for run in kept.get(name, ())]
        found = _of_code([_without(run, in_ci.get(name, {})) for run in (*earlier, now)], code[name])
        if found:
            runs[name] = found
    return runs


def _without(run: Run, others: Mapping[str, Collection[str]]) -> Run:
    left = {
        package: [one for one in found if one not in others.get(package, ())]
        for package, found in run["releases"].items()
    }
    return {**run, "releases": left}


def _of_code(runs: Iterable[Run], code: str) -> list[Run]:
    """Those of the patch as it is, the ones of one day and revision as one."""
    merged: dict[tuple[str, str], Run] = {}
    for run in runs:
        if run["code"] != code or not any(run["releases"].values()):
            continue
        whole = merged.setdefault((run["date"], run["revision"]), {**run, "releases": {}})
        for package, found in run["releases"].items():
            both = {*whole["releases"].get(package, ()), *found}
            if both:
                whole["releases"][package] = sorted(both, key=Version)
    return list(merged.values())
