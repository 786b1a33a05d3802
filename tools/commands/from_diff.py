"""`from-diff`: a diff becomes a patch folder, judged on every pinned release of its package, or on those asked for."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version
from rich.console import Console
from rich.table import Table
from rich.text import Text
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.bundles import catalogue, displaced
from vllm_livepatch.tools.commands import rendering
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.diffs import judging, reading
from vllm_livepatch.tools.diffs.folder import folder_of, write
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import registry, sources

_FETCHED_AT_ONCE = 4
APPLIES = Text("applies", style="green")
"""A diff does not say whether a release needs the change."""


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
    releases: Sequence[str] = (),
    site_packages: Path | None = None,
    fixed: Sequence[str] = (),
) -> Outcome:
    """Read the diff, judge it, and write the patch if any release can use it. Raises UserError.

    It is judged on every pinned release, or on `releases` and on what is installed in `site_packages` alone. A folder
    that was made of this diff before keeps what it has of other releases. `fixed` are releases that are known to have
    the change in another form. `tell` is given warnings.
    """
    name = name.replace("_", "-")
    shipped = catalogue.load()
    if name in shipped:
        raise UserError(f"{name} is a patch that comes with vllm-livepatch: give yours another name")
    folder_of(name, out)
    diff = reading.parse(data, include, exclude)
    judged: list[judging.Judged] = []
    unread: list[tuple[str, str]] = []
    fixed = [one.removeprefix(f"{diff.package}==") for one in fixed]
    beside = fixed if releases or site_packages is not None else []
    for release, place in _asked(diff.package, [*releases, *beside], site_packages):
        if isinstance(place, sources.SourcesError):
            unread.append((release, str(place)))
        else:
            modules = functools.partial(_modules, place, diff.package)
            judged.append(judging.judge(diff, release, Tree([str(place)]).source, modules, release in fixed))
    strange = sorted({*fixed} - {release for release, _ in unread} - {item.release for item in judged})
    if strange:
        raise UserError(f"--fixed-upstream {strange[0]}: no such release of {diff.package} was judged")
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
    judged = sorted(outcome.judged, key=lambda item: Version(item.release))
    for (verdict, detail), alike in itertools.groupby(judged, lambda item: (item.verdict, item.detail)):
        releases = [item.release for item in alike]
        span = ", ".join(releases) if len(releases) < 3 else f"{releases[0]} to {releases[-1]}"
        table.add_row(
            f"{package} {span}", APPLIES if verdict == "needed" else rendering.coloured(verdict), Text(detail)
        )
    for release, why in outcome.unread:
        table.add_row(f"{package} {release}", "unread", Text(why))
    console.print(table)
    console.print(Text(f"changes: {', '.join(change.module for change in outcome.diff.changes)}"))
    for path, why in outcome.diff.aside:
        console.print(Text(f"set aside: {path} ({why})"))
    if outcome.folder is None:
        console.print(Text("the diff applies to none of these releases: nothing was written"))
        return
    console.print(Text(f"{outcome.folder}: the patch"))
    console.print(Text(f"  vllm-livepatch generate --out BUNDLE --patch-dir {outcome.folder.parent}"))


def _sources(package: str, release: str) -> Tree:
    """The tree of a pinned release."""
    return Tree([str(sources.site_packages(package, release))])


def _asked(
    package: str, releases: Sequence[str], site_packages: Path | None
) -> Iterator[tuple[str, Path | sources.SourcesError]]:
    """The code of each release that is asked for, or of every pinned one, oldest first; or why it cannot be had."""
    pinned = [pin.version for pin in registry.pins(package)]
    named = [one.removeprefix(f"{package}==") for one in releases]
    unknown = [one for one in named if one not in pinned]
    if unknown:
        raise UserError(
            f"{package} {', '.join(unknown)} is not pinned: name where it is installed, as --site-packages DIR"
        )

    def fetched(version: str) -> Path | sources.SourcesError:
        try:
            return sources.site_packages(package, version)
        except sources.SourcesError as error:
            return error

    every = not releases and site_packages is None
    wanted = [one for one in pinned if every or one in named]
    yield from zip(wanted, threads.each(fetched, wanted, _FETCHED_AT_ONCE), strict=True)
    if site_packages is not None:
        release = installed.release(package, check.directory_tree(site_packages, [package]))
        if release is None:
            raise UserError(f"{site_packages} has no {package} that says which release it is")
        yield release, site_packages


def _modules(place: Path, package: str) -> Iterator[tuple[str, bool, str]]:
    """Every module of a package's sources: its name, whether it is a package's `__init__`, its text."""
    for file in sorted((place / package).rglob("*.py")):
        parts = file.relative_to(place).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield ".".join(parts[:-1] if is_package else parts), is_package, file.read_text("utf-8", "replace")
