"""A diff against the modules of one release: it applies, the release contains it, or it has drifted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.sitecustomize.changes import Change, HunkError, changed, contained, places
from vllm_livepatch.tools.compatibility import imports
from vllm_livepatch.tools.diffs.reading import Diff

Modules = Callable[[], Iterable[tuple[str, bool, str]]]
"""All modules of a release: name, whether it is a package's `__init__`, text."""


@dataclass(frozen=True)
class Judged:
    """A diff against one release. `verdict`: needed (applies exactly), fixed-upstream (contained), or drifted."""

    release: str
    verdict: str
    code: dict[str, str]  # module: fingerprint
    detail: str = ""


def judge(
    diff: Diff, release: str, source: imports.Source, modules: Modules | None = None, fixed: bool = False
) -> Judged:
    """One release, given the text of any of its modules. With `modules` it is also seen to that no other module imports
    a name that the diff takes away. `fixed`: somebody has seen that this release has it in another form.
    """
    sources = {change.module: source(change.module) for change in diff.changes}
    if fixed:
        return Judged(release, "fixed-upstream", _fingerprints(diff, sources), "as --fixed-upstream says")
    try:
        made, moved = _made(diff, sources, source)
    except HunkError as error:
        why = str(error)
        if all(_has(change, sources[change.module]) for change in diff.changes):
            return Judged(release, "fixed-upstream", _fingerprints(diff, sources))
        return Judged(release, "drifted", {}, why)
    packages = {change.module for change in diff.changes if change.package}
    lacking = imports.lacking(sources, made, packages, source)
    if lacking:
        return Judged(release, "drifted", {}, f"applied, it imports what is not there: {', '.join(lacking)}")
    missed = _missed(sources, made, modules) if modules is not None else []
    if missed:
        return Judged(release, "drifted", {}, f"it takes away what others import: {', '.join(missed)}")
    note = f"hunks moved by up to {moved} lines" if moved else ""
    return Judged(release, "needed", _fingerprints(diff, sources), note)


def _made(diff: Diff, sources: dict[str, str | None], source: imports.Source) -> tuple[dict[str, str], int]:
    """The text of each module as changed, and how far the hunks were from where the diff says. Raises HunkError."""
    made: dict[str, str] = {}
    moved = 0
    for change in diff.changes:
        text = sources[change.module]
        if change.added:
            if text is not None:
                raise HunkError(f"{change.module} exists already")
            made[change.module] = change.text
            parent = change.module.rpartition(".")[0]
            if parent not in sources and source(parent) is None:
                raise HunkError(f"{change.module} is added, but not its package")
        elif text is None:
            raise HunkError(f"there is no {change.module}")
        else:
            try:
                found = places(text, change.hunks)
                made[change.module] = changed(text, change.hunks)
            except HunkError as error:
                raise HunkError(f"{change.module}: {error}") from None
            off = (abs(place + 1 - hunk.line) for place, hunk in zip(found, change.hunks, strict=True) if hunk.old)
            moved = max(moved, *off, 0)
        try:
            fingerprint.parsed(made[change.module])
        except (SyntaxError, ValueError, RecursionError) as error:
            raise HunkError(f"{change.module}, changed, is not Python: {error}") from None
    return made, moved


def _has(change: Change, text: str | None) -> bool:
    """Whether a module is as the diff would make it."""
    if text is None:
        return False
    return text == change.text if change.added else contained(text, change.hunks)


def _fingerprints(diff: Diff, sources: dict[str, str | None]) -> dict[str, str]:
    """Of the modules that the diff changes."""
    texts = {change.module: sources[change.module] or "" for change in diff.changes if not change.added}
    found = {name: fingerprint.of_names(text, {name: ""})[name] for name, text in texts.items()}
    return {name: value for name, value in found.items() if value is not None}


def _missed(sources: dict[str, str | None], made: dict[str, str], modules: Modules) -> list[str]:
    taken = {name: imports.gone(text, made[name]) for name, text in sources.items() if text is not None}
    taken = {name: names for name, names in taken.items() if names}
    if not taken:
        return []
    words = {word for names in taken.values() for word in names}
    found: list[str] = []
    for module, package, text in modules():
        if module not in made and any(word in text for word in words):
            found += [f"{what} (by {module})" for what in imports.missed(module, text, package, taken)]
    return list(dict.fromkeys(found))
