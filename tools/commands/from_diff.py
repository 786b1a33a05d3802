"""`from-diff`: a diff becomes a patch folder, judged against every pinned release of its package."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.bundles import catalogue, displaced
from vllm_livepatch.tools.commands import rendering
from vllm_livepatch.tools.diffs import judging, reading
from vllm_livepatch.tools.diffs.folder import folder_of, write
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import registry, sources

_FETCHED_AT_ONCE = 4


@dataclass(frozen=True)
class Outcome:
    """What became of a diff. `folder` is None where it applies to no release, and then nothing was written."""

    diff: reading.Diff
    judged: tuple[judging.Judged, ...]
    unread: tuple[tuple[str, str], ...]  # releases that the registry did not give, with the reason
    folder: Path | None


def read(file: str) -> bytes:
    """A file, or standard input for `-`; of one that is too large, only so much as tells. Raises UserError."""
    try:
        if file == "-":
            return sys.stdin.buffer.read(reading.LARGEST + 1)
        with open(file, "rb") as opened:
            return opened.read(reading.LARGEST + 1)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error


def make(
    data: bytes,
    name: str,
    out: Path,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    origin: str = "",
    tell: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Read the diff, judge it, and write the patch if any release can use it. Raises UserError.

    `tell` is given a line for each release.
    """
    name = name.replace("_", "-")
    shipped = catalogue.load()
    if name in shipped:
        raise UserError(f"{name} is a patch that comes with vllm-livepatch: give yours another name")
    folder_of(name, out)
    diff = reading.parse(data, include, exclude)
    modules = ", ".join(change.module for change in diff.changes)
    tell(f"the diff changes {modules}; judging it against the pinned releases of {diff.package}")
    judged: list[judging.Judged] = []
    unread: list[tuple[str, str]] = []
    for release, tree in _trees(diff.package):
        if isinstance(tree, sources.SourcesError):
            unread.append((release, str(tree)))
            tell(f"{diff.package} {release}: {tree}")
        else:
            judged.append(
                judging.judge(diff, release, Tree([str(tree)]).source, functools.partial(_modules, tree, diff.package))
            )
            tell(f"{diff.package} {release}: {judged[-1].verdict}")
    if not judged:
        raise UserError(f"no release of {diff.package} can be read: {unread[0][1] if unread else 'none is pinned'}")
    applies = any(item.verdict == "needed" for item in judged)
    folder = write(diff, name, origin or name, judged, out) if applies else None
    if folder is not None:
        for warning in displaced.warnings([*shipped.values(), catalogue.read(folder)], _sources):
            tell(f"warning: {warning}")
    return Outcome(diff, tuple(judged), tuple(unread), folder)


def show(outcome: Outcome, console: Console) -> None:
    """The table of releases, and what to do next."""
    package = outcome.diff.package
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("release", "verdict", "why"):
        table.add_column(column, overflow="fold")
    for (verdict, detail), alike in itertools.groupby(outcome.judged, lambda item: (item.verdict, item.detail)):
        releases = [item.release for item in alike]
        span = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
        table.add_row(f"{package} {span}", rendering.coloured(verdict), Text(detail))
    for release, why in outcome.unread:
        table.add_row(f"{package} {release}", "unread", Text(why))
    console.print(table)
    for path, why in outcome.diff.aside:
        console.print(Text(f"set aside: {path} ({why})"))
    if outcome.folder is None:
        console.print(Text("the diff applies to none of these releases: nothing was written"))
        return
    console.print(Text(f"{outcome.folder}: the patch"))
    console.print(Text(f"  vllm-livepatch generate --out BUNDLE --patch-dir {outcome.folder.parent}"))


def _sources(package: str, release: str) -> Tree:
    """The tree of a release that was just judged."""
    return Tree([str(sources.site_packages(package, release))])


def _trees(package: str) -> Iterator[tuple[str, Path | sources.SourcesError]]:
    """The sources of every pinned release, oldest first; the error where they cannot be had."""

    def fetched(version: str) -> Path | sources.SourcesError:
        try:
            return sources.site_packages(package, version)
        except sources.SourcesError as error:
            return error

    versions = [pin.version for pin in registry.pins(package)]
    yield from zip(versions, threads.each(fetched, versions, _FETCHED_AT_ONCE), strict=True)


def _modules(place: Path, package: str) -> Iterator[tuple[str, bool, str]]:
    """Every module of a package's sources: its name, whether it is a package's `__init__`, its text."""
    for file in sorted((place / package).rglob("*.py")):
        parts = file.relative_to(place).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield ".".join(parts[:-1] if is_package else parts), is_package, file.read_text("utf-8", "replace")
