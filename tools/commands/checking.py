"""`check` as a whole: what is asked, what is found, what is shown of it, and the exit code."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.decision import Patch
from vllm_livepatch.tools import patch_lock
from vllm_livepatch.tools.bundles import catalogue, shared
from vllm_livepatch.tools.bundles.displaced import is_shipped
from vllm_livepatch.tools.commands import explanation
from vllm_livepatch.tools.compatibility import check, pairs
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import command, verdicts
from vllm_livepatch.tools.in_bundle.naming import known
from vllm_livepatch.tools.proving import proofs
from vllm_livepatch.tools.releases import published, registry
from vllm_livepatch.tools.releases.sources import SourcesError


@dataclass(frozen=True)
class Question:
    """The command's options. Without releases, wheels and a place it is about this interpreter."""

    releases: Sequence[str] = ()
    wheels: Sequence[Path] = ()
    python: str | None = None
    site_packages: Path | None = None
    diff: bool = True
    required: Sequence[str] = ()
    patch_dirs: Sequence[Path] = ()
    only: bool = False  # the patches of `patch_dirs`, without those that come with this project
    proofs: Path | None = None


@dataclass(frozen=True)
class Answer:
    packages: dict[str, str | None]
    patches: list[check.Checked]
    pair: dict[str, Any] | None
    unmet: tuple[str, ...]  # of the patches that are required: what they lack, a sentence each
    unserved: str | None = None  # the line for an interpreter in which nothing would be patched
    unusable: Sequence[str] = ()  # variables of this environment that mean nothing, a line each
    distributions: Mapping[str, str] = field(default_factory=dict)  # of a package, where it has another name
    shared: Sequence[str] = ()  # of patches that would be applied: what two of them wrap, a sentence each
    unlocked: Sequence[Path] = ()  # folders of patches that know no code yet

    @property
    def named(self) -> dict[str, str | None]:
        """The releases, by the names of the distributions."""
        return {self.distributions.get(package, package): release for package, release in self.packages.items()}

    @property
    def failed(self) -> bool:
        blocked = any(patch.blocked for patch in self.patches)
        return blocked or bool(self.unmet) or bool(self.unserved) or bool(self.pair and self.pair["broken"])

    @property
    def code(self) -> int:
        """The exit code: a variable that means nothing is bad input, 2, where nothing is worse."""
        return 1 if self.failed else 2 if self.unusable else 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """Syntax trees are many objects without a cycle: to look for cycles among them takes a second, and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # nor later, nor at the end of the process
            gc.enable()


@_uncollected()
def find(question: Question) -> Answer:
    """Everything that is shown, whatever has to be fetched for it included. Raises UserError."""
    if question.python is not None and question.site_packages is not None:
        raise UserError("--python and --site-packages exclude each other")
    if question.only and not question.patch_dirs:
        raise UserError("--only is about the patches of --patch-dir and --installed: name one")
    entries = catalogue.load(question.patch_dirs, own=not question.only)
    if question.proofs is not None:
        entries = proofs.with_proofs(entries, question.proofs)
    catalogue.go_together(entries.values())
    required = [known(entries, name) for name in question.required]
    patches = [entry.patch for entry in entries.values()]
    packages_of_all = sorted({package for patch in patches for package in patch.packages})
    releases = [_with_package(one, patches) for one in question.releases]
    others = check.released(releases, question.wheels, patches)
    tree: installed.Tree | None = None
    unserved: str | None = None
    if question.site_packages is not None:
        asked_there = [package for package in packages_of_all if package not in others]
        tree, where = check.directory_tree(question.site_packages, asked_there), str(question.site_packages)
    elif question.python is not None or not others:
        where = question.python or sys.executable
        asked = check.interpreter_tree(where, packages_of_all)
        tree, unserved = asked, asked.unserved
    else:
        where = "what was named"
        patches = [patch for patch in patches if patch.package in others]
    tree = check.CombinedTree(tree, others) if others or tree is None else tree
    changes = {patch.name: entries[patch.name].changes() for patch in patches}
    packages, answers = check.check(patches, tree, changes)
    for name in others.keys() - packages.keys() - {"torch"}:
        packages[name] = installed.release(name, tree)
    if not packages and all(tree.origin(f"{package}.__init__") is None for package in packages_of_all):
        raise UserError(f"{where} has neither {' nor '.join(packages_of_all)}: there is nothing to check")
    shipped = [name for name, entry in entries.items() if is_shipped(entry.folder)]
    answers = verdicts.with_forms(
        answers, shipped, tree, lambda patch, variant: entries[patch.name].wrappers(variant), run=True
    )
    answers = check.with_holders(answers, tree)
    if question.diff:
        answers = check.explained(answers, tree, others)
    pair = pairs.of_tree(tree)
    described = pair.described(None if question.diff else lambda problem: "") if pair else None
    unlocked = [entry.folder for entry in entries.values() if not entry.patch.variants]
    unusable = verdicts.unusable([entry.patch for entry in entries.values()], os.environ)
    unmet = _unmet(required, answers)
    names = check.distributions_of(packages, tree)
    together = tuple(shared.sentences(entries[one.patch.name] for one in answers if one.decision.apply))
    return Answer(packages, answers, described, unmet, unserved, unusable, names, together, unlocked)


def tree_of(targets: Sequence[str], release: str | None, site_packages: Path | None) -> installed.Tree:
    """The code of one release, or of a directory, for targets of one package. Raises UserError."""
    package = targets[0].partition(":")[0].partition(".")[0]
    if release is not None and site_packages is not None:
        raise UserError("--release and --site-packages exclude each other")
    if site_packages is not None:
        return check.directory_tree(site_packages, [package])
    patches = [entry.patch for entry in catalogue.load().values()]
    pinned = registry.pins(package)
    asked = f"{package}=={pinned[-1].version}" if pinned else package
    if release is not None:
        asked = f"{package}=={release}" if release[:1].isdigit() else release
    try:
        name, _, version = asked.partition("==")
        return published.tree(name, version) if version else next(iter(check.released([asked], [], patches).values()))
    except SourcesError as error:
        raise UserError(str(error)) from error


def _with_package(release: str, patches: Sequence[Patch]) -> str:
    """PACKAGE==VERSION of a release that may be a version alone. Raises UserError where that can be several."""
    packages = sorted({patch.package for patch in patches})
    if not release[:1].isdigit():
        return release
    if len(packages) > 1:
        raise UserError(f"--release {release} is of {' or '.join(packages)}: --release {packages[-1]}=={release}, say")
    return f"{packages[0]}=={release}"


def _unmet(required: Sequence[str], answers: Sequence[check.Checked]) -> tuple[str, ...]:
    decisions = {answer.patch.name: answer.decision for answer in answers}
    found = []
    for name in required:
        decision = decisions.get(name)
        if decision is None:
            found.append(f"{name} is required, and its package was not looked at")
        elif not decision.apply:
            found.append(f"{name} is required, and would not be applied ({decision.reason}): {decision.detail}")
    return tuple(found)


def show(answer: Answer, as_json: bool, verbose: bool = False) -> None:
    if as_json:
        judged = {"patches": [one.described() for one in answer.patches], "pairs": [answer.pair] if answer.pair else []}
        names = {"distributions": answer.distributions} if answer.distributions else {}
        command.say(json.dumps({"packages": answer.packages, **names, **judged}, indent=1))
    else:
        explanation.print_check(Console(), answer.named, answer.patches, verbose)
        for sentence in answer.shared:
            print(sentence)
        for folder in answer.unlocked:
            print(f"{folder} has no {patch_lock.NAME}: vllm-livepatch lock {folder} --release VERSION")
        if answer.pair:
            pairs.print_pair(Console(soft_wrap=True), answer.pair)
    for message in (*answer.unusable, *filter(None, [answer.unserved]), *answer.unmet):
        print(f"vllm-livepatch: {message}", file=sys.stderr)
