"""`lock`: the code of the releases that a patch was verified on, as fingerprints in its `patch.lock`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize import cache, installed
from vllm_livepatch.sitecustomize.decision import Patch, PatchError, module_of
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools import patch_lock
from vllm_livepatch.tools.bundles import leading, patch_files
from vllm_livepatch.tools.bundles.displaced import is_shipped
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.forms import unlike
from vllm_livepatch.tools.patch_lock import Code, Form
from vllm_livepatch.tools.releases import published, registry, releases_file
from vllm_livepatch.tools.releases.sources import SourcesError
from vllm_livepatch.tools.toml import tomllib

FEW = 6
"""So many releases are named; of more, how many they are."""
Asked = Mapping[tuple[str, str], installed.Tree]
"""The code of releases, by package and version."""


def folders(place: Path) -> list[Path]:
    """The patch folder, or those in the directory. Raises UserError."""
    if (place / "patch.toml").is_file():
        return [place]
    found = [file.parent for file in sorted(place.glob("*/patch.toml"))]
    if not found:
        raise UserError(f"{place} is no patch, and has none: a patch is a folder with a patch.toml")
    return found


def lock(folder: Path, asked: Asked) -> Iterator[str]:
    """Write the folder's patch.lock anew: the releases that it has, those that patch.toml names, and those asked for.

    What was done, a line each. Raises UserError, and nothing is written then.
    """
    said, patch = _said(folder)
    before = {(form.package, one): form.code for form in _locked(folder, patch) for one in form.releases}
    named = [str(release) for entry in said.get("variant", []) for release in entry.get("releases", [])]
    own = dict.fromkeys([*(one for package, one in before if package == patch.package), *named])
    wanted = [(patch.package, release) for release in own]
    for package in relied_on(patch):
        kept = [release for of, release in before if of == package and (of, release) not in asked]
        every = [pin.version for pin in registry.pins(package)]
        wanted += [(package, release) for release in dict.fromkeys([*kept, *every])]
    wanted += [one for one in asked if one not in wanted and one[0] in (patch.package, *relied_on(patch))]
    if not any(package == patch.package for package, _ in wanted):
        raise UserError(f"patch {patch.name}: name a release that it is for, as --release {patch.package}==VERSION")
    codes = dict(zip(wanted, _each(lambda one: _code(patch, one, asked, before), wanted), strict=True))
    for again in (one for one in asked if one in before):
        changed = sorted(name for name, digest in before[again].items() if codes[again].get(name, digest) != digest)
        if changed:
            yield f"{patch.name}: what was locked as {' '.join(again)} had other code of {', '.join(changed)}"
    lacking = [one for one, code in codes.items() if one[0] == patch.package and not set(patch.targets) & code.keys()]
    yield from (f"{patch.name}: {' '.join(one)} has none of its targets" for one in lacking if one[1] not in own)
    codes |= {one: {} for one in lacking}
    if not any(set(patch.targets) & code.keys() for code in codes.values()):
        lacks = f"patch {patch.name}: none of these releases has {patch.targets[0]}"
        raise UserError(f"{lacks}: name one that has it as well, and these become not-present")
    if is_shipped(folder):  # a release that lacks the code is one of which that is known
        others = [(patch.package, pin.version) for pin in registry.all_pins(patch.package) if pin.version not in own]
        found = zip(others, _each(lambda one: _code(patch, one, asked, before), others), strict=True)
        codes |= {one: {} for one, code in found if not set(patch.targets) & code.keys()}
    forms = patch_lock.grouped(codes)
    text = patch_lock.written(forms, patch.package, patch.names)
    try:
        whole = to_patch(patch.name, patch_lock.joined(said, tomllib.loads(text)))
    except PatchError as error:
        raise UserError(str(error)) from error
    for variant in (one for one in whole.variants if one.applies and one.verdict != "not-present"):
        one = patch.package, variant.releases[-1]
        with contextlib.suppress(SourcesError):  # a nightly that was locked before
            tree = asked[one] if one in asked else published.tree(*one)
            wrappers = leading.made(folder, whole, variant)
            why = unlike(whole, wrappers) or next(leading.misread(wrappers, tree), "")
            if why:
                raise UserError(f"patch {patch.name}, {' '.join(one)}: {why}")
    releases_file.write(folder / patch_lock.NAME, text)
    nowhere = [name for name in patch.names if not any(name in form.code for form in forms)]
    count = sum(form.package == patch.package and bool(form.code) for form in forms)
    locked = [version for (package, version), code in codes.items() if package == patch.package and code]
    which = ", ".join(locked) if len(locked) <= FEW else f"{len(locked)} releases"
    lost = f"; none has {', '.join(nowhere)}" if nowhere else ""
    yield f"{patch.name}: locked for {which} ({count} {'form' if count == 1 else 'forms'} of the code){lost}"


def of_release(patch: Patch, tree: installed.Tree, package: str) -> dict[str, str]:
    """The fingerprints of the patch's names that a package's code has."""
    found = installed.look(patch, tree, cache.Fingerprints(None).of_names).code
    return {name: digest for name in names_of(patch, package) if (digest := found[name]) is not None}


def names_of(patch: Patch, package: str) -> list[str]:
    """Those of the patch's names that are one package's."""
    others = relied_on(patch)
    return [name for name in patch.names if (_top(name) if _top(name) in others else patch.package) == package]


def asked_for(
    folder: Path, releases: Sequence[str], python: str | None, site_packages: Path | None
) -> dict[tuple[str, str], installed.Tree]:
    """The trees of what the command names for one folder: releases of the registry, and what is installed there.

    A release alone is one of the patched package. Raises UserError.
    """
    _, patch = _said(folder)
    named = [one if one[:1].isalpha() else f"{patch.package}=={one}" for one in releases]
    trees: dict[tuple[str, str], installed.Tree] = {}
    for one in named:
        for package, tree in check.released([one], [], [patch]).items():
            trees[package, getattr(tree, "version", "")] = tree
    packages = [patch.package, *relied_on(patch)]
    if python is not None or site_packages is not None:
        here: installed.Tree = (
            check.directory_tree(site_packages, packages)
            if site_packages is not None
            else check.interpreter_tree(str(python), packages)
        )
        there = {package: installed.release(package, here) for package in packages if here.has(package)}
        if patch.package not in there:
            raise UserError(f"{site_packages or python} has no {patch.package}: there is nothing to lock")
        for package, release in there.items():
            if release is None:
                raise UserError(f"{site_packages or python} does not say which release its {package} is")
            trees[package, release] = here
    return trees


def _said(folder: Path) -> tuple[dict[str, Any], Patch]:
    """What patch.toml says, and the patch without its code. Raises UserError."""
    file = folder / "patch.toml"
    name = folder.name.replace("_", "-")
    patch_files.look(folder)
    try:
        said = patch_lock.parsed(file.read_text("utf-8"))
        bare = {key: value for key, value in said.items() if key not in ("variant", "companion", "code", "read")}
        patch = to_patch(name, bare)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, PatchError) as error:
        raise UserError(f"{file}: {str(error).splitlines()[0]}") from error
    if patch.diff:
        raise UserError(f"patch {name} is a diff: from-diff writes its lock")
    return said, patch


def _locked(folder: Path, patch: Patch) -> list[Form]:
    file = folder / patch_lock.NAME
    if not file.is_file():
        return []
    try:
        return patch_lock.forms_of(patch_lock.parsed(file.read_text("utf-8")), patch.package)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def relied_on(patch: Patch) -> list[str]:
    """The other packages whose code the patch calls."""
    return [top for top in dict.fromkeys(map(_top, patch.calls)) if top != patch.package]


def _top(name: str) -> str:
    return module_of(name).partition(".")[0]


def _code(patch: Patch, one: tuple[str, str], asked: Asked, before: Mapping[tuple[str, str], Code]) -> Code:
    package, release = one
    try:
        if one not in asked and "+" in release:  # the registry would give the public release, whose code is another's
            raise SourcesError(f"{package} {release} is not in the registry: name where it is installed")
        return of_release(patch, asked[one] if one in asked else published.tree(package, release), package)
    except SourcesError as error:
        names = names_of(patch, package)
        known = {name for (of, _), code in before.items() if of == package for name in code}
        if one in before and known.issuperset(names):  # a nightly that the registry does not have
            return {name: digest for name, digest in before[one].items() if name in names}
        raise UserError(f"patch {patch.name}: {error}") from error


def _each(do: Callable[[tuple[str, str]], Code], wanted: Iterable[tuple[str, str]]) -> Iterator[Code]:
    with ThreadPoolExecutor() as pool:
        yield from pool.map(do, wanted)
