"""Patches of others: those that installed distributions bring, and those of bundles, which `generate` merges."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import util
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize.decision import PatchError
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools.bundles import patch_files
from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.bundles.displaced import is_shipped
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.forms import unlike
from vllm_livepatch.tools.in_bundle.verifying import verified

GROUP = "vllm_livepatch.patches"
"""The group of entry points by which a distribution names a package of its own that holds patch folders."""


def installed() -> list[Path]:
    """The directories of patch folders that installed distributions name. Imports none of them. Raises UserError."""
    found: dict[Path, None] = {}
    for point in sorted(entry_points(group=GROUP)):
        who = point.dist.name if point.dist else "a distribution"
        places = _folders(point.value.partition("[")[0].strip())
        if not places:
            raise UserError(f"{who} names its patches {point.value} ({GROUP}), which is no package")
        holding = [place for place in places if any(place.glob("*/patch.toml"))]
        if not holding:
            raise UserError(
                f"{who} names its patches {point.value} ({GROUP}), and there is no folder with a patch.toml"
            )
        found |= dict.fromkeys(holding)
    if not found:
        raise UserError(f"no installed distribution brings patches: none has an entry point in {GROUP}")
    return list(found)


def _folders(package: str) -> list[Path]:
    """Where a package lies: of a namespace package, each place. None of it is imported."""
    top, *rest = package.split(".")
    try:
        spec = util.find_spec(top)  # an editable distribution's finder knows it
    except (ImportError, ValueError):
        return []
    places = list(spec.submodule_search_locations or []) if spec else []
    for part in rest:
        spec = PathFinder.find_spec(part, places)
        places = list(spec.submodule_search_locations or []) if spec else []
    return [Path(place) for place in places]


def merged(entries: Mapping[str, Entry], bundles: Sequence[Path]) -> tuple[dict[str, Entry], list[str]]:
    """The patches of `entries` and of the bundles; of those by one name the newest. And a sentence for each left out.

    Raises UserError, also where two of one name and version differ.
    """
    found, left = dict(entries), []
    for place in bundles:
        for name, facts, folder in _of_bundle(place):
            here = found.get(name)
            versions = (_version(place, name, facts), (here.patch.version or 0) if here else -1)
            if versions[0] > versions[1]:
                found[name] = _entry(place, name, facts, folder)
                if here:
                    left.append(f"{name}: version {versions[0]} of {place} instead of version {versions[1]}")
            elif versions[0] < versions[1]:
                left.append(f"{name}: version {versions[1]} instead of version {versions[0]} of {place}")
            elif here is not None and not _same(here, facts, folder):
                raise UserError(f"{name} of {place} differs from that of {here.folder}: give one a higher version")
            elif here is not None and facts.get("proof"):
                proofs = here.facts.get("proof", [])
                proofs = [*proofs, *(proof for proof in facts["proof"] if proof not in proofs)]
                found[name] = _entry(place, name, {**here.facts, "proof": proofs}, here.folder)
    return found, left


def _of_bundle(place: Path) -> list[tuple[str, dict[str, Any], Path]]:
    """Name, facts and folder of each patch of a bundle. Raises UserError where it is not whole, or no directory."""
    if place.is_file():
        raise UserError(f"{place} is a file: unpack it, and name the directory")
    bundle = verified(place)
    if bundle.differences:
        raise UserError(f"{place} is not what generate wrote: {bundle.differences[0]}")
    package = place / bundle.generation / "_vllm_livepatch"
    try:
        facts = json.loads((package / "catalogue.json").read_bytes())["patches"]
        return [(name, facts[name], package / "patches" / name.replace("-", "_")) for name in sorted(facts)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place}: its catalogue cannot be read: {error}") from error


def _version(place: Path, name: str, facts: Any) -> int:
    version = facts.get("version", 0) if isinstance(facts, dict) and name.replace("-", "_").isidentifier() else None
    if not isinstance(version, int):
        raise UserError(f"{place}: its catalogue is none of a bundle's")
    return version


def _entry(place: Path, name: str, facts: dict[str, Any], folder: Path) -> Entry:
    try:
        return Entry(folder, facts, to_patch(name, facts))
    except PatchError as error:
        raise UserError(f"{place} was made by another version of vllm-livepatch: {error}") from error


def _same(here: Entry, facts: Mapping[str, Any], folder: Path) -> bool:
    return _without(here.facts) == _without(facts) and _code(here.folder) == _code(folder)


def _without(facts: Mapping[str, Any]) -> str:
    """What decides what a patch does, which what is said of it does not."""
    return json.dumps({key: facts[key] for key in facts if key not in ("about", "proof")}, sort_keys=True)


def _code(folder: Path) -> dict[str, bytes]:
    found = {file.relative_to(folder).as_posix(): file.read_bytes() for file in patch_files.files(folder)}
    kept = {name: text for name, text in found.items() if name not in patch_files.FACTS}
    return {name: text for name, text in kept.items() if text or name != "__init__.py"}


def refuse_unlike(entries: Iterable[Entry]) -> None:
    """Raises UserError where a patch's code gives other wrappers than its patch.toml names. Runs that code.

    The wrappers of this project's patches fit. Code that asks for the package that it patches makes none here.
    """
    for entry in (entry for entry in entries if not entry.patch.diff and not is_shipped(entry.folder)):
        for variant in (one for one in entry.patch.variants if one.applies and one.verdict != "not-present"):
            why = ""
            with suppress(UserError):
                why = unlike(entry.patch, entry.wrappers(variant))
            if why:
                raise UserError(f"{entry.folder}: {why}")
