"""What the toolkit makes of code that it does not list: `python -m vllm_livepatch.tools.upkeep.unlisted`.

Each patch is judged as if it had last been looked at on an older release of its package (`UNTIL`), on each pinned
release after that one, or on those that `--only` names. What has drifted is proven, as `prove` does it. Beside it
stands what is known of that release today; of another build (`--tree`), what the releases before and after it agree
on. `--write` keeps what came of a tree as soon as it is played, in the place of what was kept of it, and makes the
table in docs/compatibility.md of all that is kept.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.decision import Patch
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.commands import matrix
from vllm_livepatch.tools.in_bundle import verdicts
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.measured import measured_on
from vllm_livepatch.tools.proving import playing, proving
from vllm_livepatch.tools.releases import registry, sources

UNTIL = {"vllm": "0.29.0", "lmcache": "0.5.3"}
"""The releases that the facts were chosen with (issue M)."""
SECONDS = 600.0
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
KEPT = ROOT / "tests" / "results" / "unlisted.json"
LEFT_OUT = ("fixed-upstream", "not-present")
"""Verdicts of which a process says nothing."""
COMMAND = "python -m vllm_livepatch.tools.upkeep.unlisted --write, and --only 'PACKAGE VERSION' or --tree 'NAME=DIR'"
NAME = "unlisted"
"""Of the markers that the table stands between."""
PATCHED = ("known", "unverified", "proven")
FOR_GOOD = ("refused", "not run", "gone", "changed")
"""The cells that have drifted, and that no proof speaks for."""
NAMED = (*FOR_GOOD, "silent", "wrong")
"""The cells whose patches are kept by name."""
COLUMNS = (*PATCHED, "no fault", *NAMED)


@dataclass(frozen=True)
class Cell:
    """One patch on one tree, and what is made of it there. `known` is today's verdict, where there is one.

    `changed`: the code means something else to the patch than on each release that was known. It must be left alone.
    """

    patch: str
    tree: str
    known: str | None
    verdict: str
    outcome: str | None
    detail: str
    changed: bool = False

    @property
    def column(self) -> str:
        """Where it is counted. `silent`: the patch is needed, and is left out without a word."""
        if self.outcome is None:
            counted = {"needed": "known", "fixed-upstream": "known", "drifted": "gone"}.get(self.verdict, self.verdict)
        else:
            names = {"proven": "proven", "no-fault": "no fault", "failed": "refused", "not-run": "not run"}
            counted = names[self.outcome]
        if self.known == "needed" and self.verdict in LEFT_OUT:
            return "silent"
        if self.changed:
            return "changed" if counted in FOR_GOOD else "wrong"
        wrong = {"unverified": LEFT_OUT, "proven": LEFT_OUT, "no fault": ("needed",)}
        return "wrong" if self.known in wrong.get(counted, ()) else counted

    @property
    def counts(self) -> bool:
        """Whether the tree needs the patch, or nobody knows; or something is wrong."""
        needed = self.known == "needed" or (self.known is None and self.verdict not in LEFT_OUT)
        return needed or self.column == "wrong"


def until(entry: Entry, release: str) -> Entry:
    """The entry as it was when `release` of its package was the newest that its forms name."""
    forms = [
        {**form, "releases": kept}
        for form in entry.facts["variant"]
        if (kept := [one for one in form["releases"] if Version(one) <= Version(release)])
    ]
    facts = {**entry.facts, "variant": forms}
    return replace(entry, facts=facts, patch=to_patch(entry.patch.name, facts))


def later(package: str, release: str) -> list[str]:
    """The names of the pinned releases after this one."""
    return [f"{package} {pin.version}" for pin in registry.pins(package) if Version(pin.version) > Version(release)]


def path_of(tree: str, place: str | None = None) -> list[str]:
    """Where to import a tree from (`place`, or where the release is fetched to), with the other package's newest."""
    package, _, version = tree.partition(" ")
    newest = {one: registry.pins(one)[-1].version for one in UNTIL if one != package}
    others = [str(sources.site_packages(one, which)) for one, which in newest.items()]
    return [os.path.abspath(place) if place else str(sources.site_packages(package, version)), *others]


def known(patch: Patch, tree: str) -> str | None:
    """What today's facts say of a release; of another build, what the releases before and after it have in common."""
    package, _, version = tree.partition(" ")
    said = {release: form.verdict for form in patch.variants for release in form.releases}
    if version in said:
        return said[version]
    try:
        build = Version(version)
    except InvalidVersion:
        return None
    releases = [Version(pin.version) for pin in registry.pins(package)]
    around = (max(filter(build.__gt__, releases), default=None), min(filter(build.__lt__, releases), default=None))
    before, after = (said.get(str(one)) for one in around)
    return before if before == after else None


def cells(
    entries: Mapping[str, Entry], tree: str, path: Sequence[str], beside: Sequence[str], *, frozen: bool
) -> Iterator[Cell]:
    """Each patch that has a form, on one tree. `frozen`: by the facts until then; else nothing is known of it."""
    package = tree.partition(" ")[0]
    place = installed.Tree([*path, *beside])
    places = dict.fromkeys(UNTIL, path)
    where = playing.Interpreter(str(environments.engine()), [*path, *beside], SECONDS, places)
    chosen = [entry for entry in entries.values() if entry.patch.package == package and not entry.patch.diff]
    past = {entry.patch.name: until(entry, UNTIL[package]) if frozen else entry for entry in chosen}
    past = {name: entry for name, entry in past.items() if entry.patch.variants}

    def cell(judged: verdicts.Judged) -> Cell:
        name, verdict = judged.patch.name, judged.decision.verdict
        outcome = None
        if verdict == "drifted":
            outcome = proving.prove(past[name], judged, functools.partial(playing.play, where=where))
        gone = outcome is not None and outcome.reason in ("gone", "not-present")
        return Cell(
            name,
            tree,
            known(entries[name].patch, tree) if frozen else None,
            verdict,
            None if outcome is None or gone else outcome.outcome,
            judged.decision.detail if outcome is None else outcome.detail,
            frozen and _changed(entries[name].patch, past[name].patch, tree.partition(" ")[2]),
        )

    found = verdicts.judge([entry.patch for entry in past.values()], place)[1]
    yield from threads.each(cell, found, at_once=len(os.sched_getaffinity(0)))


def _changed(patch: Patch, past: Patch, release: str) -> bool:
    """Whether a release's facts are those of no release that was known."""
    own = [form.facts for form in patch.variants if release in form.releases and form.verdict == "needed"]
    return bool(own) and all(form.facts != own[0] for form in past.variants)


def row(found: Sequence[Cell]) -> dict[str, Any]:
    """What is kept of a tree: how many of the cells that count stand where, and which patches are in some columns."""
    counted = Counter(cell.column for cell in found if cell.counts)
    named = {column: [cell.patch for cell in found if cell.counts and cell.column == column] for column in NAMED}
    return {"cells": {one: counted[one] for one in COLUMNS if counted[one]}, **{k: v for k, v in named.items() if v}}


def table(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a line for each tree, the releases before the other builds."""
    columns = ("on", "cells", *COLUMNS, "patched", "drift for good", "seen")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for tree in sorted(kept, key=_order):
        cells = kept[tree]["cells"]
        count = sum(cells.values())
        shares = (sum(cells.get(one, 0) for one in columns) for columns in (PATCHED, FOR_GOOD))
        numbers = [str(cells.get(column, "")) for column in COLUMNS]
        shown = [f"{share / count:.0%}" if count else "" for share in shares]
        lines.append("| " + " | ".join([tree, str(count), *numbers, *shown, kept[tree]["date"]]) + " |")
    return "\n".join(lines) + "\n"


def _order(tree: str) -> tuple[Any, ...]:
    package, _, version = tree.partition(" ")
    listed = any(pin.version == version for pin in registry.pins(package))
    return not listed, tuple(UNTIL).index(package), Version(version)


def keep(tree: str, found: Sequence[Cell], seconds: float, place: Path = KEPT) -> None:
    """Put a tree's row in the place of the one that was kept of it."""
    kept = read(place)
    kept[tree] = {**measured_on(ROOT), "seconds": round(seconds), **row(found)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept, key=_order))
    said = json.dumps({"command": COMMAND, "until": UNTIL})[:-1]
    place.write_text(f'{said}, "trees": {{\n{lines}\n}}}}\n', encoding="utf-8")


def read(place: Path = KEPT) -> dict[str, Any]:
    """What is kept, by the tree's name."""
    return dict(json.loads(place.read_text(encoding="utf-8"))["trees"]) if place.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_livepatch.tools.upkeep.unlisted", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--tree",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="another build's DIR; NAME is as 'vllm 0.27.2.dev20260807'",
    )
    parser.add_argument(
        "--only", action="append", help="a release, as 'vllm 0.30.0', fetched if need be; may be given again"
    )
    parser.add_argument("--patch", action="append", help="a patch's name; may be given again")
    parser.add_argument("--write", action="store_true", help=f"keep each tree in {KEPT.name}, and write {PAGE.name}")
    parser.add_argument("--kept", action="store_true", help="play nothing: the table is of what is kept")
    asked = parser.parse_args()
    if asked.patch and asked.write:
        parser.error("--write keeps whole trees, not one patch")
    entries = catalogue.load()
    if asked.patch:
        entries = {name: entries[name] for name in asked.patch}
    builds = dict(given.split("=", 1) for given in asked.tree)
    releases = asked.only or ([] if builds else [name for package in UNTIL for name in later(package, UNTIL[package])])
    for name in () if asked.kept else (*releases, *builds):
        found, begun = [], time.monotonic()
        for cell in cells(entries, name, path_of(name, builds.get(name)), beside(), frozen=True):
            found.append(cell)
            print(json.dumps({**asdict(cell), "column": cell.column}), flush=True)
        if asked.write:
            keep(name, found, time.monotonic() - begun)
            matrix.write(PAGE, table(read()), NAME)
        else:
            print(json.dumps({name: row(found)}), file=sys.stderr)
    if asked.kept:
        made = table(read())
        print(made)
        if asked.write:
            matrix.write(PAGE, made, NAME)
    return 0


def beside() -> list[str]:
    """Where the libraries are that a proof needs beside both packages."""
    python = environments.engine()
    return [str(environments.nixl(python)), str(environments.mooncake(python))]


if __name__ == "__main__":
    sys.exit(main())
