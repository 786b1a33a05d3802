"""A new release of vLLM or LMCache, in one command: `python -m vllm_livepatch.tools.upkeep.newrelease vllm==0.34.0`.

For a checkout. Fetches the release's sources, prints every patch's verdict and what drifted, writes the pin
(tools/releases/releases.toml), the patches' data (patch.toml, patch.lock), the release lists of the tests
(tests/releases/*.toml), what a check of the newest releases reads (tools/compatibility/reads.txt) and the whole texts
(tools/bundles/whole_texts.toml), and runs the release tests on it. Where a patch's tests fail, what was written of it
is taken back. The rest is a diff for a person to review. Exit 1 where tests failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn
from xml.etree import ElementTree

import typer
from packaging.version import InvalidVersion, Version
from rich.console import Console
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.tools import patch_lock
from vllm_livepatch.tools.bundles import catalogue, whole_texts
from vllm_livepatch.tools.commands import ending, explanation, locking
from vllm_livepatch.tools.compatibility import check as checking
from vllm_livepatch.tools.compatibility import reads
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import published, registry, releases_file, sources
from vllm_livepatch.tools.releases.registry import Pin
from vllm_livepatch.tools.toml import tomllib
from vllm_livepatch.tools.upkeep import catalogue_edits

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path("tests", "releases")


@dataclass(frozen=True)
class Written:
    """What was written: the text before, by file, and what was done, by patch."""

    before: Mapping[Path, str]
    done: Mapping[str, str]


def main(
    release: Annotated[str, typer.Argument(metavar="PKG==VERSION")],
    jobs: Annotated[int, typer.Option("--jobs", "-n", help="Release tests at a time.")] = 2,
) -> None:
    """Fetch, judge, write, drive: what a new release takes."""
    if not (ROOT / TESTS).is_dir():
        raise UserError("a checkout's data is written: this runs in none")
    package, version = _parsed(release)
    console = Console()
    judged(console, package, version)
    written = write(package, version)
    for name, done in written.done.items():
        console.print(f"{name}: {done}", highlight=False, soft_wrap=True)
    registry.all_pins.cache_clear()
    reads.write()
    whole_texts.write()
    failed = drive(version, jobs)
    entries = catalogue.load()
    for name, tests in failed.items():
        for file in ("patch.toml", patch_lock.NAME) if name in entries else ():
            place = entries[name].folder / file
            if place in written.before:
                releases_file.write(place, written.before[place])
        console.print(f"{name}: not as expected, for a person to look at: {', '.join(tests)}", style="red")
    console.print("review: git diff; then the pages: docs/contributing.md#the-figures-and-the-pages", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def judged(console: Console, package: str, version: str) -> None:
    """Print every patch's verdict, and what drifted. Raises UserError."""
    entries = {name: entry for name, entry in catalogue.load().items() if entry.patch.package == package}
    patches = [entry.patch for entry in entries.values()]
    tree = checking.CombinedTree(None, checking.released([f"{package}=={version}"], [], patches))
    packages, answers = checking.check(patches, tree, {name: entry.changes() for name, entry in entries.items()})
    explanation.print_check(console, packages, checking.explained(answers, tree))


def write(package: str, version: str) -> Written:
    """Write pin, variants and test data. Raises UserError."""
    older = [pin.version for pin in registry.pins(package) if Version(pin.version) < Version(version)]
    if not older:
        raise UserError(f"{package} {version} is older than every pinned release")
    before: dict[Path, str] = {}
    done: dict[str, str] = {}

    def replace(file: Path, text: str) -> None:
        before.setdefault(file, catalogue_edits.read(file))
        if text != before[file]:
            releases_file.write(file, text)

    texts: list[tuple[Path, str]] = []
    try:
        directory = sources.site_packages(package, version)
        wheel = registry.find_wheel(package, version)
        digest = sources.sources_digest(_python_files(directory, package))
    except (sources.SourcesError, registry.RegistryError) as error:
        raise UserError(str(error)) from error
    tree = published.tree(package, version)
    for name, entry in catalogue.load().items():
        if package in entry.patch.packages and not entry.patch.diff:
            said, locked, done[name] = in_folder(entry, package, version, older[-1], tree)
            texts += [(entry.folder / "patch.toml", said), (entry.folder / patch_lock.NAME, locked)]
    for file in sorted((ROOT / TESTS).glob("*.toml")):
        texts.append((file, catalogue_edits.with_release(catalogue_edits.read(file), version, older[-1])))
    pin = Pin(package, version, wheel.name, wheel.sha256, digest)
    pins = releases_file.with_table(catalogue_edits.read(registry.PINS_FILE), releases_file.table(pin))
    for file, text in [*texts, (registry.PINS_FILE, pins)]:
        replace(file, text)
    return Written(before, done)


def in_folder(
    entry: catalogue.Entry, package: str, version: str, previous: str, tree: installed.Tree
) -> tuple[str, str, str]:
    """A patch's two files with the release `version` of one of its packages, and what was done in a few words.

    Code that a listed release has: what is said of that one holds of this one. Code that none has: what is said of the
    release `previous`, for a person to judge. Raises UserError.
    """
    patch, own = entry.patch, package == entry.patch.package
    said, locked = (catalogue_edits.read(entry.folder / file) for file in ("patch.toml", patch_lock.NAME))
    forms = patch_lock.forms_of(tomllib.loads(locked), patch.package)
    if any(form.package == package and version in form.releases for form in forms):
        return said, locked, "listed already"
    code = locking.of_release(patch, tree, package)
    if own and not code:
        return said, locked, "not present, nothing to write"
    alike = [form.releases for form in forms if form.package == package and dict(form.code) == code]
    done = f"the code of {alike[0][-1]}" if alike else f"new code, proposed to be as {previous}: a person judges"
    if own:
        said = catalogue_edits.said_of_too(said, version, alike[0] if alike else [previous])
    after = patch_lock.with_code(forms, package, version, code)
    return said, patch_lock.written(after, patch.package, patch.names), done


def drive(version: str, jobs: int) -> dict[str, list[str]]:
    """Run the release tests on a release: those that failed, by patch (by file, where that is about none)."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", str(TESTS), "-q", "-k", version, f"--junitxml={report}"]
        parallel = ["-n", str(jobs)] if jobs > 1 else []
        code = subprocess.run([*command, *parallel], cwd=ROOT, env={**os.environ, "PYTHONSAFEPATH": ""}).returncode
        if code not in (0, 1):
            raise UserError(f"the release tests could not be run: pytest ended with {code}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed: dict[str, list[str]] = {}
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            file = ROOT / (case.get("classname", "").replace(".", "/") + ".py")
            for name in patches_of(file) or [file.name]:
                failed.setdefault(name, []).append(case.get("name", ""))
    return failed


def patches_of(file: Path) -> list[str]:
    """The patches that a file of release tests names."""
    text = catalogue_edits.read(file) if file.is_file() else ""
    return [name for name in catalogue.load() if f'"{name}"' in text]


def _python_files(directory: Path, package: str) -> Iterator[tuple[str, bytes]]:
    for file in directory.joinpath(package).rglob("*.py"):
        yield file.relative_to(directory).as_posix(), file.read_bytes()


def _parsed(release: str) -> tuple[str, str]:
    package, equals, version = release.partition("==")
    if not equals or not registry.pins(package):
        raise UserError(f"{release!r} is not vllm==VERSION or lmcache==VERSION")
    try:
        return package, str(Version(version))
    except InvalidVersion as error:
        raise UserError(f"{version!r} is not a version") from error


def run() -> NoReturn:
    """Run the command; bad input is one line on stderr and exit 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    ending.end_with(app, name="newrelease", bare=())


if __name__ == "__main__":
    run()
