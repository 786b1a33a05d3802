"""Every patch's verdict for what is installed, without importing it: as a process decides, by the same functions."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ...sitecustomize import cache, installed, order, patch_code, settings
from ...sitecustomize.changes import Change, HunkError
from ...sitecustomize.context import PatchContext
from ...sitecustomize.decision import Decision, Installed, Patch, Variant, decide, module_of
from ...sitecustomize.facts import to_patch
from ...sitecustomize.redaction import sentence
from ...sitecustomize.source_changes import no_place, placed
from . import forms


@dataclass(frozen=True)
class Judged:
    """One patch against what is installed."""

    patch: Patch
    installed: Installed
    decision: Decision

    @property
    def blocked(self) -> bool:
        """Wanted, and could not apply."""
        return self.decision.wanted and not self.decision.apply

    def described(self) -> dict[str, Any]:
        return {
            "name": self.patch.name,
            "verdict": self.decision.verdict,
            "reason": self.decision.reason,
            "detail": self.decision.detail,
            "targets": [{"target": name, "fingerprint": self.installed.code.get(name)} for name in self.patch.names],
        }


@dataclass(frozen=True)
class Catalogue:
    """What a bundle says of itself and its patches."""

    version: str
    patches: tuple[Patch, ...]
    changes: Mapping[str, tuple[Change, ...]]  # of the diffs among them, by name
    shipped: tuple[str, ...] = ()  # the patches of this project, by name


def catalogue() -> Catalogue:
    """The catalogue of the bundle that this module is in. Raises what a damaged one comes to: see `main.py`."""
    package: Any = sys.modules[__name__.partition(".")[0]]
    content = json.loads(package.__spec__.loader.get_data(os.path.join(package.__path__[0], "catalogue.json")))
    changes = content["changes"].items()
    return Catalogue(
        content["version"],
        tuple(to_patch(name, facts) for name, facts in sorted(content["patches"].items())),
        {name: tuple(Change.from_json(change) for change in each) for name, each in changes},
        tuple(content["shipped"]),
    )


def unusable(patches: Iterable[Patch], environ: Mapping[str, str]) -> list[str]:
    """What stands in an environment's variables and means nothing, as a process has it on stderr: a line each."""
    environment = settings.read(list(patches), environ)
    return [sentence(trouble) for trouble in (*environment.errors, *environment.notes)]


def judge(
    patches: Iterable[Patch], tree: installed.Tree, changes: Mapping[str, Sequence[Change]] | None = None
) -> tuple[dict[str, str | None], list[Judged]]:
    """The releases of the packages that are there, and each patch's decision, as this environment's variables have it.

    `changes` are those of the diffs among the patches, by name. As in a process, diffs come first, each on what those
    before it make of the modules, and wrappers are decided on what all of them make.
    """
    chosen = list(patches)
    environment = settings.read(chosen, os.environ)
    of_names = together(chosen, cache.Fingerprints(cache.directory(os.environ)).of_names)
    packages: dict[str, str | None] = {}
    answers: dict[str, Judged] = {}
    texts: dict[str, str] = {}
    diffs: dict[str, list[str]] = {}
    by_name = {patch.name: patch for patch in chosen}
    first = sorted(by_name, key=lambda name: (not by_name[name].diff, by_name[name].auto == "traced", name))
    for patch in map(by_name.__getitem__, order.placed(first, order.left_out(chosen))):
        found = installed.look(patch, tree if patch.diff else installed.Overlay(tree, texts, diffs), of_names)
        if found.release is not None or any(found.code.get(name) for name in patch.names_of(patch.package)):
            packages[patch.package] = found.release
        packages.update(found.companions)
        others = (answer for answer in answers.values() if patch.name in answer.patch.order.instead_of)
        instead = next((answer.patch.name for answer in others if answer.decision.apply), "")
        decision = decide(patch, found, dataclasses.replace(environment, instead=instead))
        if decision.apply and patch.diff and changes is not None:
            try:
                texts.update(placed(changes[patch.name], installed.Overlay(tree, texts)))
                for change in changes[patch.name]:
                    diffs.setdefault(change.module, []).append(patch.name)
            except HunkError as error:
                decision = no_place(error)
        if decision.apply and patch.traced:
            environment = dataclasses.replace(environment, traced=True)
        answers[patch.name] = Judged(patch, found, decision)
    return packages, [answers[patch.name] for patch in chosen]


def together(patches: Iterable[Patch], of_names: installed.OfNames) -> installed.OfNames:
    """`of_names` that is asked for all patches' names of a module at once, since parsing is what takes the time."""
    wanted: dict[str, dict[str, str]] = {}
    for patch in patches:
        for name in patch.names:
            wanted.setdefault(module_of(name), {})[name] = name.partition(":")[2]

    def asked(source: str, names: Mapping[str, str]) -> dict[str, str | None]:
        everything = {
            **names,
            **{key: name for module in map(module_of, names) for key, name in wanted[module].items()},
        }
        found = of_names(source, everything)
        return {name: found[name] for name in names}

    return asked


def here(found: Catalogue) -> tuple[dict[str, str | None], list[Judged]]:
    """The verdicts for what this interpreter, as it was started, would import."""
    tree = installed.Process()
    packages, answers = judge(found.patches, tree, found.changes)
    return packages, with_forms(answers, found.shipped, tree, _made)


_Answer = TypeVar("_Answer", bound=Judged)


def with_forms(
    answers: Iterable[_Answer],
    shipped: Collection[str],
    tree: installed.Tree,
    made: Callable[[Patch, Variant | None], Mapping[str, Any]],
    run: bool = False,
) -> list[_Answer]:
    """The answers; a patch that a process would refuse, because its wrappers cannot stand for its targets, is refused.

    Those of this project fit. `made` gives the wrappers of another, where it names something else than functions, or
    where `run` has each of them asked.
    """
    found = []
    for answer in answers:
        patch, decision = answer.patch, answer.decision
        if decision.apply and not patch.diff and patch.name not in shipped:
            wrappers = functools.partial(made, patch, decision.variant)
            reason, why = forms.unfit(patch, decision.variant, tree, wrappers, run)
            if why:
                decision = dataclasses.replace(decision, apply=False, reason=reason, detail=why)
        found.append(dataclasses.replace(answer, decision=decision))
    return found


def made_by(code: Any, patch: Patch, variant: Variant | None) -> dict[str, Any]:
    """The wrappers that a patch's module makes for a form of the code. Runs that code, and raises what it raises."""
    options = settings.read([patch], {}).options[patch.name]
    facts = {} if variant is None else variant.facts
    return dict(code.wrappers(PatchContext(patch.name, options, facts, lambda: None)))


def _made(patch: Patch, variant: Variant | None) -> dict[str, Any]:
    """The same of this bundle's patch."""
    with barred(patch):
        return made_by(patch_code.load(__name__.partition(".")[0], patch.name), patch, variant)


@contextmanager
def barred(patch: Patch) -> Iterator[None]:
    """The patch's packages are not imported for its code: what asks for them makes no wrappers."""
    packages = [package for package in patch.packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for package in packages:
            del sys.modules[package]
