"""`check`: what is installed in an interpreter or a directory, judged without importing any of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize import installed, settings
from vllm_livepatch.sitecustomize.changes import Change, HunkError
from vllm_livepatch.sitecustomize.decision import Decision, Installed, Patch, decide
from vllm_livepatch.sitecustomize.source_changes import no_place, placed
from vllm_livepatch.tools.errors import UserError

# Asks an interpreter where it would import from. Finding a top-level package's spec does not import it.
_PROBE = """
import importlib.util, json, sys
found = {}
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    found[name] = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps([sys.path, found]))
"""


@dataclass(frozen=True)
class Checked:
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


def interpreter_tree(python: str, packages: Iterable[str]) -> installed.Tree:
    """The tree that an interpreter imports from. Raises UserError where it cannot be asked."""
    environ = {**os.environ, "LIVEPATCH": "off"}
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE, *packages], capture_output=True, text=True, timeout=60, env=environ, check=True
        )
        path, found = json.loads(answer.stdout)
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{python} cannot say what is installed: {said}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} is not an interpreter that can be asked: {error}") from error
    return installed.Tree([part for part in path if part], {name: places for name, places in found.items() if places})


def directory_tree(directory: Path) -> installed.Tree:
    """The tree of a site-packages directory, of an unpacked image's too."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    return installed.Tree([str(directory.absolute())])


def check(
    patches: Iterable[Patch], tree: installed.Tree, changes: Mapping[str, Sequence[Change]] | None = None
) -> tuple[dict[str, str | None], list[Checked]]:
    """The releases of the packages that are there, and each patch's decision, as this environment's variables have it.

    `changes` are those of the diffs among the patches, by name. As in a process, diffs come first, each on what those
    before it make of the modules, and wrappers are decided on what all of them make.
    """
    chosen = list(patches)
    environment = settings.read(chosen, os.environ)
    packages: dict[str, str | None] = {}
    answers: dict[str, Checked] = {}
    texts: dict[str, str] = {}
    for patch in sorted(chosen, key=lambda patch: (not patch.diff, patch.auto == "traced", patch.name)):
        found = installed.look(patch, tree if patch.diff else installed.Overlay(tree, texts))
        if found.release is not None or any(found.code.values()):
            packages[patch.package] = found.release
        decision = decide(patch, found, environment)
        if decision.apply and patch.diff and changes is not None:
            try:
                texts.update(placed(changes[patch.name], installed.Overlay(tree, texts)))
            except HunkError as error:
                decision = no_place(error)
        if decision.apply and patch.traced:
            environment = dataclasses.replace(environment, traced=True)
        answers[patch.name] = Checked(patch, found, decision)
    return packages, [answers[patch.name] for patch in chosen]
