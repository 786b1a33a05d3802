"""`matrix`: every patch against every pinned release, by the decision that runs in the process.

A cell is *executed* where a release test drove exactly this code of this release, stock and patched (stock alone where
the release is left alone), and *read* where only its fingerprints are known. The release tests keep the record of that
in executed.toml (`pytest tests/releases --keep-record`), and fail where it claims more than they ran. What CI leaves
out and was run by hand is in executed_by_hand.toml, with date and revision. It counts while the patch's code is as it
was.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from packaging.version import Version
from rich.console import Console
from rich.table import Table
from rich.text import Text
from vllm_livepatch import patches as own_patches
from vllm_livepatch.sitecustomize import cache, installed
from vllm_livepatch.sitecustomize.decision import (
    Installed,
    Patch,
    Verdict,
    judge,
    judge_companion,
    module_of,
)
from vllm_livepatch.sitecustomize.release_order import public_release
from vllm_livepatch.tools import comments, threads
from vllm_livepatch.tools.bundles import patch_files
from vllm_livepatch.tools.commands.rendering import COLOURS, DEFAULTS
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import published, registry, releases_file, span
from vllm_livepatch.tools.releases.registry import Pin
from vllm_livepatch.tools.releases.sources import SourcesError
from vllm_livepatch.tools.toml import tomllib

T = TypeVar("T")
Known = Literal["executed", "executed by hand", "read"]
MARKS: Mapping[Known, str] = {"executed": "*", "executed by hand": "†", "read": ""}
NAMES = {"vllm": "vLLM", "lmcache": "LMCache"}
EXECUTED_FILE = Path(__file__).with_name("executed.toml")
BY_HAND_FILE = EXECUTED_FILE.with_name("executed_by_hand.toml")


class Run(TypedDict):
    """A patch's release tests of one file, run by hand: `releases` by package, `code` of the patch's folder."""

    file: str
    code: str
    date: str
    revision: str
    releases: dict[str, list[str]]


@dataclass(frozen=True)
class Cell:
    """One patch on one release, and how that is known."""

    verdict: Verdict
    known: Known
    detail: str
    files: Mapping[str, Known] = field(default_factory=dict)
    """The files of release tests that executed it, and where. A cell is known as the least of them is."""


@dataclass(frozen=True)
class Matrix:
    """`releases` are (package, version), by package and oldest first; `cells` by patch, then release."""

    releases: tuple[tuple[str, str], ...]
    patches: tuple[Patch, ...]
    cells: Mapping[str, Mapping[tuple[str, str], Cell]]

    def described(self) -> dict[str, Any]:
        """As `matrix --json` prints it."""

        def rows(value: Callable[[Cell], T]) -> dict[str, dict[str, T]]:
            return {
                name: {f"{package}=={version}": value(cell) for (package, version), cell in row.items()}
                for name, row in self.cells.items()
            }

        return {
            "releases": [f"{package}=={version}" for package, version in self.releases],
            "patches": rows(lambda cell: cell.verdict),
            "known": rows(lambda cell: cell.known),
            "files": rows(lambda cell: dict(cell.files)),
        }


@functools.cache
def executed() -> Mapping[str, Mapping[str, Mapping[str, list[str]]]]:
    """The releases on which the release tests executed a patch, by patch, file of tests and package."""
    found: Mapping[str, Mapping[str, Mapping[str, list[str]]]] = tomllib.loads(EXECUTED_FILE.read_text("utf-8"))
    return found


def by_hand() -> Mapping[str, list[Run]]:
    """The runs that are kept beside CI's, by patch; none where there is no such file."""
    text = BY_HAND_FILE.read_text("utf-8") if BY_HAND_FILE.is_file() else ""
    found: Mapping[str, list[Run]] = tomllib.loads(text)
    return found


@functools.cache
def executed_by_hand() -> Mapping[str, Mapping[str, Mapping[str, frozenset[str]]]]:
    """As `executed`: the releases of the runs by hand with our patches' code as it is now."""
    found: dict[str, dict[str, dict[str, frozenset[str]]]] = {}
    for name, runs in by_hand().items():
        codes = {code_of(Path(place, name.replace("-", "_"))) for place in own_patches.__path__}
        for run in runs:
            for package, releases in run["releases"].items() if run["code"] in codes else ():
                of_file = found.setdefault(name, {}).setdefault(run["file"], {})
                of_file[package] = of_file.get(package, frozenset()) | {*releases}
    return found


def files_of(name: str, package: str, version: str) -> dict[str, Known]:
    """The files of release tests that executed a patch on a release."""
    found: dict[str, Known] = {}
    for file, packages in executed_by_hand().get(name, {}).items():
        if version in packages.get(package, ()):
            found[file] = "executed by hand"
    for file, releases in executed().get(name, {}).items():
        if version in releases.get(package, ()):
            found[file] = "executed"
    return dict(sorted(found.items()))


def code_of(folder: Path) -> str:
    """Tells apart the versions of a patch's code, options and targets; not those of what is written about them."""
    facts = tomllib.loads((folder / "patch.toml").read_text("utf-8"))
    parts = [repr([sorted(facts.get(key, [])) for key in ("targets", "calls")]), repr(facts.get("option"))]
    for file in patch_files.code(folder):
        lines = comments.left_out(file.read_text("utf-8")).split("\n")
        parts.append("\n".join(line for line in lines if line))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def make(patches: Iterable[Patch]) -> Matrix:
    """Judge every patch on every pinned release of its package. Raises UserError."""
    chosen = tuple(patches)
    packages = dict.fromkeys(
        [*(patch.package for patch in chosen), *(one for patch in chosen for one in patch.packages)]
    )
    pins = [pin for package in packages for pin in registry.all_pins(package)]
    fingerprints = cache.Fingerprints(cache.directory(os.environ))

    def column(pin: Pin) -> dict[str, Cell]:
        concerned = [patch for patch in chosen if pin.package in patch.packages]
        tree = published.tree(pin.package, pin.version)
        tree.prefetch({module_of(name) for patch in concerned for name in patch.names_of(pin.package)})
        return {
            patch.name: _cell(patch, pin.package, installed.look(patch, tree, fingerprints.of_names))
            for patch in concerned
        }

    try:
        columns = dict(zip(((pin.package, pin.version) for pin in pins), threads.each(column, pins), strict=True))
    except SourcesError as error:
        raise UserError(str(error)) from error
    cells = {
        patch.name: {release: column[patch.name] for release, column in columns.items() if patch.name in column}
        for patch in chosen
    }
    return Matrix(tuple(columns), chosen, cells)


def _cell(patch: Patch, package: str, found: Installed) -> Cell:
    """One package alone: of another than the patched one, whether the patch was verified with its code."""
    own = package == patch.package
    verdict, detail, form = judge(patch, found) if own else judge_companion(patch, package, found)
    release = found.release if own else found.companions.get(package)
    version = public_release(release or "")
    # A release that has none of the code has no form either, and what was run there is what there is instead.
    counts = version in form.releases if form is not None else verdict == "not-present"
    files = files_of(patch.name, package, version) if counts else {}
    # One file's tests are about one half of a patch: it is known as the half that is run least.
    known: Known = ("executed by hand" if "executed by hand" in files.values() else "executed") if files else "read"
    return Cell(verdict, known, detail, files)


def show(matrix: Matrix, console: Console) -> None:
    """A row for each patch and package, the releases of each verdict in spans."""
    verdicts = _seen(matrix)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("patch", no_wrap=True)
    for column in ("of", *verdicts, "by default"):
        table.add_column(column)
    for patch, package in _rows(matrix):
        spans = [Text(", ").join(_shown(matrix, patch, package, verdict)) for verdict in verdicts]
        table.add_row(patch.name, _of(patch, package), *spans, _default(patch, package))
    console.print(table)
    console.print()
    console.print(Text(f"{_counts(matrix)}; * executed on each of these: stock, and patched where it is needed"))
    console.print(Text("† executed likewise, on some of them not in CI but by hand"))
    console.print(Text("Without a mark: read, by the fingerprints of the code. Each release by itself: --json"))


def _default(patch: Patch, package: str) -> str:
    return DEFAULTS.get(patch.auto, "on") if package == patch.package else ""


def _shown(matrix: Matrix, patch: Patch, package: str, verdict: Verdict) -> Iterator[Text]:
    for found, known in _spans(matrix, patch, package, verdict):
        yield Text(f"{found}{MARKS[known]}", style=COLOURS.get(verdict, ""))


def markdown(matrix: Matrix) -> str:
    """A row for each patch, the releases of each verdict in spans; bold is executed."""
    verdicts = _seen(matrix)
    lines = [
        f"Releases: {_counts(matrix)}. **Bold**: executed, by a release test on this release: stock and patched where",
        "it is needed, elsewhere stock alone (†: some of it not in CI but by hand, with this code of the patch,",
        "perhaps before the test last changed; `matrix --json` says which, by which file of tests). The rest is",
        "read, by the fingerprints of the code.",
        "",
        "| patch | of | " + " | ".join(verdicts) + " | by default |",
        "|---" * (3 + len(verdicts)) + "|",
    ]
    for patch, package in _rows(matrix):
        cells = []
        for verdict in verdicts:
            found = _spans(matrix, patch, package, verdict)
            cells.append(", ".join(one if how == "read" else f"**{one}**{MARKS[how].strip('*')}" for one, how in found))
        cells.append(_default(patch, package))
        lines.append(f"| `{patch.name}` | {_of(patch, package)} | " + " | ".join(cells) + " |")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _counts(matrix: Matrix) -> str:
    return ", ".join(
        f"{len(found)} of {NAMES.get(package, package)} ({found[0][1]} to {found[-1][1]})"
        for package, group in groupby(matrix.releases, lambda release: release[0])
        if (found := list(group))
    )


def _seen(matrix: Matrix) -> list[Verdict]:
    """The verdicts that there are, in the order of their columns."""
    shown: list[Verdict] = ["needed", "fixed-upstream", "not-present", "unverified", "drifted"]
    seen = {cell.verdict for row in matrix.cells.values() for cell in row.values()}
    return [verdict for verdict in shown if verdict in seen]


def _rows(matrix: Matrix) -> Iterator[tuple[Patch, str]]:
    for patch in matrix.patches:
        for package in patch.packages:
            yield patch, package


def _of(patch: Patch, package: str) -> str:
    return NAMES.get(package, package) + ("" if package == patch.package else ", relied on")


def _spans(matrix: Matrix, patch: Patch, package: str, verdict: Verdict) -> Iterator[tuple[str, Known]]:
    """Releases next to each other that have a verdict, executed or read, as one span; whether some were run by hand."""
    row = {release: cell for release, cell in matrix.cells[patch.name].items() if release[0] == package}
    for (found, read), group in groupby(row.items(), lambda item: (item[1].verdict, item[1].known == "read")):
        cells = dict(group)
        versions = [version for _, version in cells]
        if found == verdict:
            by_hand = any(cell.known == "executed by hand" for cell in cells.values())
            known: Known = "read" if read else "executed by hand" if by_hand else "executed"
            yield span(versions), known


def block(text: str, name: str = "matrix") -> str:
    """What stands between the markers ``<!-- name -->`` and ``<!-- /name -->`` of a document. Raises UserError."""
    return _parts(text, name)[1]


def write(file: Path, table: str, name: str = "matrix") -> None:
    """Put a table between a document's markers of that name. Raises UserError."""
    try:
        before, _, after = _parts(file.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    releases_file.write(file, f"{before}<!-- {name} -->\n{table}<!-- /{name} -->{after}")


def _parts(text: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begun, rest = text.partition(f"{begin}\n")
    table, ended, after = rest.partition(end)
    if not begun or not ended:
        raise UserError(f"there is no {begin} and {end}, each at the beginning of a line, for the table to go between")
    return before, table, after


def refresh(packages: Iterable[str]) -> list[Pin]:
    """Add the final releases that the registry has and the data lacks, from the oldest pinned one on, as read.

    Raises UserError.
    """
    added: list[Pin] = []
    text = registry.PINS_FILE.read_text(encoding="utf-8")
    for package in packages:
        pinned = registry.all_pins(package)
        try:
            offered = registry.files(package)
            known = {Version(pin.version) for pin in pinned}
            oldest = min(known, default=Version("0"))
            for version in registry.final_releases(offered):
                if Version(version) in known or Version(version) < oldest:
                    continue
                wheel = registry.find_wheel(package, version, offered=offered)
                added.append(Pin(package, version, wheel.name, wheel.sha256, read=True))
        except registry.RegistryError as error:
            raise UserError(str(error)) from error
    for pin in added:
        text = releases_file.with_table(text, releases_file.table(pin))
    if added:
        releases_file.write(registry.PINS_FILE, text)
        registry.all_pins.cache_clear()
    return added
