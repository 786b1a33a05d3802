"""`check`: what is installed in an interpreter or a directory, or was published, judged without importing any of it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.changes import Change
from vllm_livepatch.sitecustomize.decision import Patch, as_it_came, module_of
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.compatibility import reads, taken
from vllm_livepatch.tools.compatibility.drift import Drift, drift
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.verdicts import Judged, judge
from vllm_livepatch.tools.releases import PACKAGES, published, registry
from vllm_livepatch.tools.releases.sources import SourcesError

SERVED = ((3, 10), (3, 14))
"""The oldest and the newest Python that a bundle serves. In others a process starts as if it were not there."""

# Asks an interpreter where it would import from. Finding a top-level package's spec does not import it.
_PROBE = """
import importlib.util, json, sys
found = {}
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    found[name] = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps([sys.path, found, sys.version_info[:2]]))
"""


@dataclass(frozen=True)
class Checked(Judged):
    """One patch against what is installed, and what drifted."""

    drift: Drift | None = None
    held: tuple[taken.Holder, ...] = ()
    """Who has taken a target before a process's patch comes: of a patch that would be applied."""

    @property
    def refused(self) -> list[taken.Holder]:
        """Those for whom a process would refuse the patch, as `captured`, whatever it imports first."""
        return [one for one in self.held if one.certain and not one.covered]

    @property
    def blocked(self) -> bool:
        return super().blocked or bool(self.refused)

    def described(self) -> dict[str, Any]:
        drifted = {} if self.drift is None else {"drift": self.drift.described()}
        held = {"held": [one.described() for one in self.held]} if self.held else {}
        return {**super().described(), **drifted, **held}


class CombinedTree(installed.Tree):
    """A tree in which some top-level packages are those of other trees."""

    def __init__(self, below: installed.Tree | None, others: Mapping[str, installed.Tree]) -> None:
        super().__init__([] if below is None else below.path)
        self._below = below
        self._others = others

    def source(self, module: str) -> str | None:
        tree = self._tree(module)
        return None if tree is None else tree.source(module)

    def unknown(self, module: str) -> str | None:
        tree = self._tree(module)
        return None if tree is None else tree.unknown(module)

    def origin(self, module: str) -> str | None:
        tree = self._tree(module)
        return None if tree is None else tree.origin(module)

    def has(self, module: str) -> bool:
        tree = self._tree(module)
        return tree is not None and tree.has(module)

    def of(self, package: str) -> installed.Tree | None:
        """The tree that has a package."""
        return self._others.get(package, self._below)

    def prefetch(self, modules: Iterable[str]) -> None:
        """Have those of the trees that can read several modules together do so."""
        wanted = list(modules)
        for top, tree in self._others.items():
            if isinstance(tree, published.PublishedTree):
                tree.prefetch([module for module in wanted if module.partition(".")[0] == top])

    def places(self, package: str) -> Sequence[str]:
        tree = self._tree(package)
        return () if tree is None else tree.places(package)

    def _tree(self, module: str) -> installed.Tree | None:
        return self.of(module.partition(".")[0])


class Rocm(installed.Tree):
    """torch as a release that was built for ROCm comes with it."""

    def __init__(self) -> None:
        super().__init__([])

    def source(self, module: str) -> str | None:
        return 'hip = "of the release"\n' if module == "torch.version" else None


class InterpreterTree(installed.Tree):
    """What an interpreter imports from, and its version."""

    def __init__(self, path: Sequence[str], packages: Mapping[str, Sequence[str]], version: Sequence[int]) -> None:
        super().__init__(path, packages)
        self.version = tuple(version)

    @property
    def unserved(self) -> str | None:
        """The line for where no bundle serves this interpreter."""
        oldest, newest = SERVED
        if oldest <= self.version <= newest:
            return None
        served = " to ".join(".".join(map(str, version)) for version in SERVED)
        return f"Python {'.'.join(map(str, self.version))} is not served: nothing is patched there ({served} are)"


def interpreter_tree(
    python: str, packages: Iterable[str], path: Sequence[str] | None = None, place: Path | None = None
) -> InterpreterTree:
    """The tree that an interpreter imports from, with this for its PYTHONPATH, and started at this place, if given.

    Raises UserError where it cannot be asked.
    """
    environ = {**os.environ, "LIVEPATCH": "off"}
    if path is not None:
        environ["PYTHONPATH"] = os.pathsep.join(path)
    try:
        said = _asked([python, "-c", _PROBE, *packages], environ, place).splitlines()
        path, found, version = json.loads(said[-1] if said else "")  # what starts with it may print as well
    except subprocess.CalledProcessError as error:
        message = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{python} cannot say what is installed: {message}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} is not an interpreter that can be asked: {error}") from error
    places = {name: places for name, places in found.items() if places}
    return InterpreterTree([part for part in path if part], places, version)


def _asked(command: Sequence[str], environ: Mapping[str, str], place: Path | None = None) -> str:
    """What a command prints. If it is not waited for to its end, what it has started ends with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environ, cwd=place, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return out


def directory_tree(directory: Path, packages: Iterable[str]) -> installed.Tree:
    """The tree of a site-packages directory, of an unpacked image's too.

    Raises UserError where one of the packages is installed there editable: its code lies elsewhere.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    tree = installed.Tree([str(directory.absolute())])
    elsewhere = _editable(directory)
    for package in packages:
        if package in elsewhere and tree.origin(f"{package}.__init__") is None:
            raise UserError(
                f"{package} is installed editable in {directory}: its code is not there, and was not looked at; "
                f"ask the interpreter that imports it: check --python PATH"
            )
    return tree


def _editable(directory: Path) -> set[str]:
    """The top-level packages of the distributions that a directory only refers to, as far as it names them."""
    found = {_top(file.stem) for file in directory.glob("*.egg-link")}
    # setuptools' own: __editable__.NAME-VERSION.pth; of a finder also the table of its packages.
    found |= {_top(file.name.split(".", 1)[1].partition("-")[0]) for file in directory.glob("__editable__.*-*.pth")}
    for distribution in distributions(path=[str(directory)]):
        if _is_editable(distribution.read_text("direct_url.json") or ""):
            found.add(_top(distribution.metadata["Name"] or ""))
            found.update((distribution.read_text("top_level.txt") or "").split())
    return found


def _is_editable(direct_url: str) -> bool:
    try:
        return json.loads(direct_url)["dir_info"]["editable"] is True
    except (ValueError, KeyError, TypeError):
        return False


def _top(distribution: str) -> str:
    """The package of a distribution that names none: its name, as modules are spelled."""
    return re.sub(r"[-_.]+", "_", distribution).lower()


def released(releases: Sequence[str], wheels: Sequence[Path], patches: Sequence[Patch]) -> dict[str, installed.Tree]:
    """The trees of PACKAGE==VERSION (PACKAGE: its newest release) and of wheel files, by the packages patches are for.

    Raises UserError.
    """
    published_releases = published.PublishedReleases()
    wanted = [_parsed(release) for release in releases]
    ahead = reads.modules() if {name for name, _ in wanted} >= set(PACKAGES) else ()

    def opened(name: str, version: str | None) -> published.PublishedTree:
        tree = published_releases.tree(name, version or published_releases.newest(name))
        tree.prefetch({module for patch in patches for module in map(module_of, patch.names)}.union(ahead))
        return tree

    known = {package for patch in patches for package in patch.packages} | {
        package for package in PACKAGES if registry.pins(package)
    }
    try:
        trees = [published.wheel_file(wheel) for wheel in wheels]
        trees += threads.each(lambda asked: opened(*asked), wanted)
    except SourcesError as error:
        others = {name for name, _ in wanted} - known
        hint = f"; patches are for {', '.join(sorted(known))}" if others else ""
        raise UserError(f"{error}{hint}") from error
    found: dict[str, installed.Tree] = {}
    for tree in trees:
        tops = tree.tops & known
        if not tops:
            raise UserError(f"no patch is for {tree.package}; there are some for {', '.join(sorted(known))}")
        if tops & found.keys():
            raise UserError(f"name one release of {min(tops)}; matrix compares many")
        found.update(dict.fromkeys(tops, tree))
        if tree.version.partition("+")[2].startswith("rocm"):
            found["torch"] = Rocm()
    return found


def distributions_of(packages: Iterable[str], tree: installed.Tree) -> dict[str, str]:
    """What the distributions are called that packages come from, where they are not called as the packages are."""
    found: dict[str, str] = {}
    for package in packages:
        part = tree.of(package) if isinstance(tree, CombinedTree) else tree
        if isinstance(part, published.PublishedTree):
            name: str | None = part.package
        else:
            path = [] if part is None else list(part.path)
            by_name = (one for one in distributions(name=package, path=path) if _provides(one, package))
            every = (one for one in distributions(path=path) if _provides(one, package))
            first = next(by_name, None) or next(every, None)
            name = first.metadata["Name"] if first is not None else None
        if name and _top(name) != _top(package):
            found[package] = name
    return found


def _provides(distribution: Distribution, package: str) -> bool:
    return any(file.parts == (package, "__init__.py") for file in distribution.files or ())


def _parsed(release: str) -> tuple[str, str | None]:
    try:
        requirement = Requirement(release)
    except InvalidRequirement:
        requirement = None
    pins = list(requirement.specifier) if requirement is not None else []
    if requirement is None or len(pins) > 1 or any(pin.operator != "==" or "*" in pin.version for pin in pins):
        raise UserError(f"--release takes PACKAGE==VERSION, or PACKAGE for its newest release, not {release!r}")
    return requirement.name, pins[0].version if pins else None


def explained(answers: Iterable[Checked], tree: installed.Tree, asked: Collection[str] = ()) -> list[Checked]:
    """The answers, with what drifted where something did.

    The registry is asked for our packages and those `asked` about, and not about anybody's own.
    """

    def fetch(package: str, release: str) -> installed.Tree:
        if package not in asked and package not in PACKAGES:
            raise SourcesError(f"{package} is nothing that the registry is asked for unless --release names it")
        return published.tree(package, release)

    return [
        dataclasses.replace(answer, drift=drift(answer.patch, answer.installed, tree, fetch))
        if answer.decision.verdict == "drifted" and not _by_a_diff(answer)
        else answer
        for answer in answers
    ]


def _by_a_diff(answer: Checked) -> bool:
    """Whether the code is one that the patch knows, but for a diff: of the release there is nothing to show."""
    return bool(answer.installed.diffs) and as_it_came(answer.patch, answer.installed)[0] != "drifted"


def with_holders(answers: Iterable[Checked], tree: installed.Tree) -> list[Checked]:
    """The answers, with who holds the targets of those that would be applied."""
    found = list(answers)
    held = taken.holders([answer.patch for answer in found if answer.decision.apply], tree)
    return [dataclasses.replace(answer, held=tuple(held.get(answer.patch.name, ()))) for answer in found]


def check(
    patches: Iterable[Patch], tree: installed.Tree, changes: Mapping[str, Sequence[Change]] | None = None
) -> tuple[dict[str, str | None], list[Checked]]:
    """As `judge`, which says more."""
    packages, answers = judge(patches, tree, changes)
    return packages, [Checked(answer.patch, answer.installed, answer.decision) for answer in answers]
