"""What the toolkit makes of code that it does not list: `python -m vllm_livepatch.tools.upkeep.unlisted`.

Each patch is judged as if it had last been looked at on an older release of its package (`--to`), on each pinned
release after that one. What has drifted is proven, as `prove` does it. Beside it stands what is known of that release
today. A tree of another build (`--tree`) has nothing beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packaging.version import Version
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.decision import Patch
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.commands import matrix
from vllm_livepatch.tools.in_bundle import verdicts
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.proving import playing, proving
from vllm_livepatch.tools.releases import registry, sources

UNTIL = {"vllm": "0.29.0", "lmcache": "0.5.3"}
"""The releases that the facts were chosen with (issue M)."""
SECONDS = 600.0
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
NAME = "unlisted"
"""Of the markers that the table stands between."""
COLUMNS = ("known", "unverified", "proven", "no fault", "refused", "not run", "gone", "changed", "wrong")


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
        """Where it is counted."""
        if self.outcome is None:
            counted = {"needed": "known", "fixed-upstream": "known", "drifted": "gone"}.get(self.verdict, self.verdict)
        else:
            names = {"proven": "proven", "no-fault": "no fault", "failed": "refused", "not-run": "not run"}
            counted = names[self.outcome]
        if self.changed:
            return "changed" if counted in ("refused", "not run", "gone") else "wrong"
        wrong = {"proven": "fixed-upstream", "no fault": "needed"}.get(counted)
        return "wrong" if wrong is not None and self.known == wrong else counted


def until(entry: Entry, release: str) -> Entry:
    """The entry as it was when `release` of its package was the newest that its forms name."""
    forms = [
        {**form, "releases": kept}
        for form in entry.facts["variant"]
        if (kept := [one for one in form["releases"] if Version(one) <= Version(release)])
    ]
    facts = {**entry.facts, "variant": forms}
    return replace(entry, facts=facts, patch=to_patch(entry.patch.name, facts))


def trees(package: str, release: str) -> dict[str, list[str]]:
    """The pinned releases after this one: by name where to import from, with the newest of the other package."""
    newest = {one: registry.pins(one)[-1].version for one in UNTIL}
    later = [pin.version for pin in registry.pins(package) if Version(pin.version) > Version(release)]
    return {
        f"{package} {version}": [
            str(sources.site_packages(one, which)) for one, which in {**newest, package: version}.items()
        ]
        for version in later
    }


def cells(
    entries: Mapping[str, Entry], tree: str, path: Sequence[str], beside: Sequence[str], *, listed: bool
) -> Iterator[Cell]:
    """Each patch that has a form, on one tree. `listed`: today's facts say what is right there."""
    package = tree.partition(" ")[0]
    place = installed.Tree([*path, *beside])
    places = dict.fromkeys(UNTIL, path)
    where = playing.Interpreter(str(environments.engine()), [*path, *beside], SECONDS, places)
    chosen = [entry for entry in entries.values() if entry.patch.package == package and not entry.patch.diff]
    past = {entry.patch.name: until(entry, UNTIL[package]) if listed else entry for entry in chosen}
    past = {name: entry for name, entry in past.items() if entry.patch.variants}
    truth = {one.patch.name: one.decision.verdict for one in verdicts.judge([e.patch for e in chosen], place)[1]}

    def cell(judged: verdicts.Judged) -> Cell:
        name, verdict = judged.patch.name, judged.decision.verdict
        outcome = None
        if verdict == "drifted":
            outcome = proving.prove(past[name], judged, functools.partial(playing.play, where=where))
        gone = outcome is not None and outcome.reason in ("gone", "not-present")
        return Cell(
            name,
            tree,
            truth[name] if listed else None,
            verdict,
            None if outcome is None or gone else outcome.outcome,
            judged.decision.detail if outcome is None else outcome.detail,
            listed and _changed(entries[name].patch, past[name].patch, tree.partition(" ")[2]),
        )

    found = verdicts.judge([entry.patch for entry in past.values()], place)[1]
    yield from threads.each(cell, found, at_once=len(os.sched_getaffinity(0)))


def _changed(patch: Patch, past: Patch, release: str) -> bool:
    """Whether a release's facts are those of no release that was known."""
    own = [form.facts for form in patch.variants if release in form.releases and form.verdict == "needed"]
    return bool(own) and all(form.facts != own[0] for form in past.variants)


def table(found: Iterable[Cell]) -> str:
    """Markdown: of each tree, how many of the patches that it needs, or whose verdict is not known, stand where."""
    rows: dict[str, Counter[str]] = {}
    for cell in found:
        if cell.known in (None, "needed") or cell.column == "wrong":
            rows.setdefault(cell.tree, Counter())[cell.column] += 1
    lines = ["| on | cells | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for tree, counted in rows.items():
        numbers = [str(counted[column] or "") for column in COLUMNS]
        lines.append(f"| {tree} | {counted.total()} | " + " | ".join(numbers) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_livepatch.tools.upkeep.unlisted", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=DIR", help="another build's DIR/vllm")
    parser.add_argument("--only", action="append", help="a tree's name, as 'vllm 0.30.0'; may be given again")
    parser.add_argument("--patch", action="append", help="a patch's name; may be given again")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    asked = parser.parse_args()
    entries = catalogue.load()
    if asked.patch:
        entries = {name: entries[name] for name in asked.patch}
    newest = {one: str(sources.site_packages(one, registry.pins(one)[-1].version)) for one in UNTIL}
    others = dict(given.split("=", 1) for given in asked.tree)
    wanted = {name: path for package, release in UNTIL.items() for name, path in trees(package, release).items()}
    wanted |= {f"vllm {name}": [os.path.abspath(place), newest["lmcache"]] for name, place in others.items()}
    python = environments.engine()
    beside = [str(environments.nixl(python)), str(environments.mooncake(python))]
    found: list[Cell] = []
    for name, path in wanted.items():
        if asked.only and name not in asked.only:
            continue
        for cell in cells(entries, name, path, beside, listed=name.partition(" ")[2] not in others):
            found.append(cell)
            print(json.dumps({**asdict(cell), "column": cell.column}), flush=True)
    made = table(found)
    print(made, file=sys.stderr)
    if asked.write:
        matrix.write(PAGE, made, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
