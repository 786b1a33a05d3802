"""The record of what a run of the release tests executed, and what is kept of it for the matrix.

Each driver's run leaves a line: the test, the releases, and the patches that its process reports as applied. A file of
tests says as PATCH (or PATCHES) which fault it shows. It has executed that patch's cell on stock where it ran that
release without the patch, and patched where it ran it with it. `needed` takes both, of one file; where the release is
to be left alone, the run without it shows that. What is kept says by which file.

CI runs some files on one release of each form of the code. LIVEPATCH_TEST_RELEASES=all (or names of releases) runs them
on the others, by hand: `--keep-record` then keeps what CI does not run, with date, revision and the patch's code.
"""

from __future__ import annotations

import ast
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

VARIABLE = "LIVEPATCH_TEST_RECORD"
"""Names the directory of the record, for the workers of one test run."""
SELECTION = "LIVEPATCH_TEST_RELEASES"
"""Set where releases are run by hand."""
ROOT = Path(__file__).parents[2]
HEAD = "# The releases on which the release tests executed each patch: pytest tests/releases --keep-record\n\n"
HEAD_BY_HAND = (
    "# What CI leaves out and was run by hand, with which code of the patch:\n"
    "# LIVEPATCH_TEST_RELEASES=all pytest tests/releases/test_proofs.py -k PATCH --keep-record\n\n"
)

Modes = dict[tuple[str, str], set[str]]
"""By (package, release): "stock", "patched", or both."""
Record = dict[str, dict[str, Modes]]
"""By patch and file of tests."""
Releases = Mapping[str, Collection[str]]
"""By package."""
Shown = Mapping[str, Mapping[str, Releases]]
"""By patch and file of tests."""


def chosen(in_ci: Sequence[str], every: Iterable[str]) -> list[str]:
    """The releases to run a test on: `in_ci`, or by hand those of all in which the fault can be driven that are asked for."""
    asked = os.environ.get(SELECTION)
    if asked is None:
        return list(in_ci)
    return [release for release in every if asked == "all" or release in asked.split(",")]


def first(every: Sequence[str]) -> list[str]:
    """The releases to run a test on whose driver the patch's proof plays too: in CI the first.

    CI runs the proof on the newest (test_proofs.py).
    """
    return chosen(every[:1], every)


def ends(every: Sequence[str]) -> list[str]:
    """The releases to run a test on: in CI the first and the last."""
    return chosen([every[0], every[-1]], every)


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
    _leave(Path(place), line)


def _leave(place: Path, line: Mapping[str, Any]) -> None:
    with (place / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as record:
        record.write(json.dumps(line) + "\n")


def note_proof(patch: str, releases: Mapping[str, str], *, proven: bool) -> None:
    """Leave a line of a proof that came to what it should: it plays the release's own code, and the patch where needed."""
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    line: dict[str, Any] = {"file": test, "driver": "proof", "releases": dict(releases), "proof": patch}
    line |= {"applied": [patch] if proven else [], "with_stock": True}
    _leave(Path(place), line)


def gathered(lines: Iterable[Mapping[str, Any]], about: Mapping[str, Iterable[str]]) -> Record:
    """The record of lines; `about` has the patches whose fault each file of tests shows."""
    record: Record = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for line in lines:
        for patch in [line["proof"]] if "proof" in line else about.get(line["file"], ()):
            modes = {"patched" if patch in line["applied"] else "stock", *(["stock"] if line.get("with_stock") else [])}
            for release in line["releases"].items():
                record[patch][Path(line["file"]).name][release] |= modes
    return record


def shown_by(file: Path) -> list[str]:
    """The patches whose fault a file of tests shows: its PATCH, or PATCHES."""
    found: list[str] = []
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in ("PATCH", "PATCHES"):
            value = ast.literal_eval(statement.value)
            found += [value] if isinstance(value, str) else value
    return found


def read(place: Path, *, only_proofs: bool = False) -> Record:
    """What the workers of a test run left. Each proof is whole by itself, in a run of some tests too."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(place.glob("*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    if only_proofs:
        lines = [line for line in lines if "proof" in line]
    return gathered(lines, {file: shown_by(ROOT / file) for file in {line["file"] for line in lines}})


def fully(matrix: Matrix, record: Record) -> dict[str, dict[str, dict[str, list[str]]]]:
    """The releases on which a file of tests executed a patch as its cell's verdict asks for: by patch, file, package."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for patch, row in matrix.cells.items():
        for file, ran in sorted(record.get(patch, {}).items()):
            for release, cell in row.items():
                wanted = {"stock", "patched"} if cell.verdict == "needed" else {"stock"}
                if wanted <= ran.get(release, set()):
                    found.setdefault(patch, {}).setdefault(file, {}).setdefault(release[0], []).append(release[1])
    return found


def overclaimed(kept: Shown, ran: Shown) -> list[str]:
    """What is kept as executed, and was not run."""
    return [
        f"{patch} on {package}=={release}, by {file}"
        for patch, files in kept.items()
        for file, packages in files.items()
        for package, releases in packages.items()
        for release in releases
        if release not in ran.get(patch, {}).get(file, {}).get(package, ())
    ]


def both(kept: Shown, ran: Shown) -> dict[str, dict[str, dict[str, list[str]]]]:
    """What is kept, and what was run."""
    return {
        patch: {
            file: _joined(kept.get(patch, {}).get(file, {}), ran.get(patch, {}).get(file, {}))
            for file in sorted({*kept.get(patch, {}), *ran.get(patch, {})})
        }
        for patch in sorted({*kept, *ran})
    }


def _joined(one: Releases, other: Releases) -> dict[str, list[str]]:
    return {
        package: sorted({*one.get(package, ()), *other.get(package, ())}, key=Version)
        for package in sorted({*one, *other}, reverse=True)
    }


def revision() -> str:
    """The commit of what is run; `-dirty` where something of it is not committed."""

    def answer(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    rooms = ["patches", "sitecustomize", "tests/releases", "tests/standins"]
    dirty = "-dirty" if answer("status", "--porcelain", "--", *rooms).strip() else ""
    return f"{answer('rev-parse', '--short', 'HEAD').strip()}{dirty}"


def with_runs(
    kept: Mapping[str, Sequence[Run]], ran: Shown, in_ci: Shown, code: Mapping[str, str], where: str
) -> dict[str, list[Run]]:
    """What is kept of runs by hand, after one more of revision `where`: the newest of each release that CI leaves out."""
    runs: dict[str, list[Run]] = {}
    for name in sorted({*kept, *ran} & {*code}):
        found: list[Run] = []
        for file in sorted({run["file"] for run in kept.get(name, ())} | {*ran.get(name, {})}):
            releases = {package: [*some] for package, some in ran.get(name, {}).get(file, {}).items()}
            now = Run(file=file, code=code[name], date=time.strftime("%Y-%m-%d"), revision=where, releases=releases)
            earlier = [_without(run, releases) for run in kept.get(name, ()) if run["file"] == file]
            left = [_without(run, in_ci.get(name, {}).get(file, {})) for run in (*earlier, now)]
            found += _of_code(left, code[name])
        if found:
            runs[name] = found
    return runs


def _without(run: Run, others: Releases) -> Run:
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
        joined = _joined(whole["releases"], run["releases"])
        whole["releases"] = {package: releases for package, releases in joined.items() if releases}
    return list(merged.values())
