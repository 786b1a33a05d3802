"""A patch's facts as data, to `Patch`. `patch.toml` and the bundle's `catalogue.json` hold the same entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decision import Option, Patch, PatchError, Variant

_ENTRIES = {"title", "package", "targets", "calls", "variant", "option", "aliases", "auto", "apart", "about"}
_ENTRIES |= {"diff", "added", "traced"}  # of source changes


def to_patch(name: str, facts: Mapping[str, Any]) -> Patch:
    """Raises PatchError, naming the patch and the entry."""
    unknown = sorted(set(facts) - _ENTRIES)
    if unknown:
        raise PatchError(f"patch {name}: no entry is called {', '.join(unknown)}")
    patch = Patch(
        name=name,
        package=_text(name, facts, "package"),
        title=_text(name, facts, "title"),
        targets=_paths(name, facts, "targets"),
        calls=_paths(name, facts, "calls") if "calls" in facts else (),
        variants=tuple(_variant(name, entry) for entry in _tables(name, facts, "variant")),
        options=tuple(_option(name, entry) for entry in _tables(name, facts, "option")),
        aliases=_texts(name, facts, "aliases"),
        auto=facts.get("auto", "needed"),
        diff=_text(name, facts, "diff") if "diff" in facts else "",
        added=_texts(name, facts, "added"),
        traced=bool(facts.get("traced", "diff" in facts)),
        apart=bool(facts.get("apart", False)),
        about=dict(facts.get("about", {})),
    )
    if patch.auto not in ("needed", "rocm", "traced", "off"):
        raise PatchError(f"patch {name}: auto is needed, rocm, traced or off, not {patch.auto!r}")
    if not patch.targets:
        raise PatchError(f"patch {name}: targets is empty")
    for variant in patch.variants:
        said = f"patch {name}: the variant of {', '.join(variant.releases)}"
        strange = sorted(set(variant.code) - set(patch.names))
        if strange:
            raise PatchError(f"{said} names {', '.join(strange)}, which is neither a target nor a call")
        if not patch.targets_of(variant):
            raise PatchError(f"{said} has no target")
    return patch


def _variant(name: str, entry: Mapping[str, Any]) -> Variant:
    verdict = entry.get("verdict", "needed")
    if verdict not in ("needed", "fixed-upstream", "not-present"):
        raise PatchError(f"patch {name}: a variant's verdict is needed, fixed-upstream or not-present, not {verdict!r}")
    releases = _texts(name, entry, "releases")
    if not releases or not isinstance(entry.get("code"), Mapping):
        raise PatchError(f"patch {name}: a variant needs releases and code")
    return Variant(
        code=dict(entry["code"]),
        releases=releases,
        verdict=verdict,
        applies=bool(entry.get("applies", True)),
        facts=dict(entry.get("facts", {})),
    )


def _option(name: str, entry: Mapping[str, Any]) -> Option:
    if "default" not in entry:
        raise PatchError(f"patch {name}: an option needs a name and a default")
    return Option(
        name=_text(name, entry, "name"),
        default=entry["default"],
        help=str(entry.get("help", "")),
        minimum=entry.get("minimum"),
        choices=_texts(name, entry, "choices"),
        aliases=_texts(name, entry, "aliases"),
        off=entry.get("off"),
    )


def _text(name: str, facts: Mapping[str, Any], entry: str) -> str:
    value = facts.get(entry)
    if not isinstance(value, str) or not value:
        raise PatchError(f"patch {name}: {entry} must be a text")
    return value


def _texts(name: str, facts: Mapping[str, Any], entry: str) -> tuple[str, ...]:
    values = facts.get(entry, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise PatchError(f"patch {name}: {entry} must be a list of texts")
    return tuple(values)


def _tables(name: str, facts: Mapping[str, Any], entry: str) -> list[Mapping[str, Any]]:
    values = facts.get(entry, [])
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise PatchError(f"patch {name}: {entry} must be an array of tables")
    return values


def _paths(name: str, facts: Mapping[str, Any], entry: str) -> tuple[str, ...]:
    paths = _texts(name, facts, entry)
    for path in paths:
        module, colon, qualname = path.partition(":")
        parts = [*module.split("."), *(qualname.split(".") if colon else ())]
        if bool(colon) == ("diff" in facts) or not all(part.isidentifier() for part in parts):
            raise PatchError(f"patch {name}: {entry} has {path!r}, which is not module:qualname (a diff's: module)")
    return paths
