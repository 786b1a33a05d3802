"""A patch's two files as one: `patch.toml`, what a person says, and `patch.lock`, the code of each release.

`patch.lock` is written by a tool and holds fingerprints alone: `[code]`, what most forms have, and a `[[variant]]` for
each form of the patched package's code, a `[[companion]]` for each of another package's. What a person says of a
release (its verdict, its facts) stands in a `[[variant]]` of `patch.toml`; one that none names needs the patch. Both
files together are the entries that `facts.to_patch` reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from vllm_livepatch.sitecustomize.decision import PatchError
from vllm_livepatch.sitecustomize.facts import known_format
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.toml import tomllib

NAME = "patch.lock"
_HEAD = "# Written by a tool (vllm-livepatch lock), not by hand: the code that this patch was verified with.\n"
Code = Mapping[str, str]


@dataclass(frozen=True)
class Form:
    """One form of a package's code: the releases that have it, and the fingerprints of the patch's names in it."""

    package: str
    releases: tuple[str, ...]
    code: Code


def joined(said: Mapping[str, Any], lock: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both files. A form of which releases are said different things becomes several variants.

    Raises UserError where the two do not fit.
    """
    own = [dict(entry) for entry in said.get("variant", [])]
    if any("code" in entry for entry in own):
        raise UserError("fingerprints stand in patch.lock or in patch.toml, not in both")
    locked = [release for form in lock.get("variant", []) for release in form["releases"]]
    named = [release for entry in own for release in entry.get("releases", [])]
    twice = sorted(release for release, count in Counter(named).items() if count > 1)
    if twice:
        raise UserError(f"two variants name {', '.join(twice)} in patch.toml")
    missing = [release for release in named if release not in locked]
    if missing:
        raise UserError(f"patch.lock knows nothing of {', '.join(missing)}: vllm-livepatch lock writes it")
    read = said.get("read", [])
    variants = [
        {**_absent(said, lock, form), **entry, "releases": releases, "code": form["code"], **_marked(read, releases)}
        for form in lock.get("variant", [])
        for entry, releases in _said_of(form["releases"], own)
    ]
    kept = {name: value for name, value in said.items() if name not in ("variant", "read")}
    whole = {"code": lock["code"]} if lock.get("code") else {}
    companions = {"companion": lock["companion"]} if lock.get("companion") else {}
    return {**kept, **whole, "variant": variants, **companions}


def _said_of(releases: Sequence[str], said: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """What is said of these releases, with those of which it is; nothing of those that nobody names."""
    rest = list(releases)
    for entry in said:
        those = [release for release in rest if release in entry["releases"]]
        if those:
            yield dict(entry), those
            rest = [release for release in rest if release not in those]
    if rest:
        yield {}, rest


def _absent(said: Mapping[str, Any], lock: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """Releases that have none of the targets do not have the code that the patch is for."""
    code = {**lock.get("code", {}), **form["code"]}
    return {} if any(code.get(target) for target in said.get("targets", [])) else {"verdict": "not-present"}


def _marked(read: Iterable[str], releases: Sequence[str]) -> dict[str, Any]:
    those = [release for release in releases if release in read]
    return {"read": those} if those else {}


def read(folder: Path) -> dict[str, Any]:
    """What patch.toml and patch.lock of a folder say together.

    Raises UserError, PatchError, OSError, TOMLDecodeError.
    """
    said = dict(parsed((folder / "patch.toml").read_text("utf-8")))
    known_format(folder.name.replace("_", "-"), said)  # before anything is read of it that may mean something else
    lock = folder / NAME
    if not lock.exists():  # all in one file, as before there was a lock, or not locked yet
        return said
    try:
        locked = parsed(lock.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{NAME} cannot be read: {error}") from error
    try:
        strange = {name for entry in (locked, *locked.get("variant", [])) for name in entry.get("code", {})}
        strange -= {*said.get("targets", []), *said.get("calls", [])}
        if strange:
            raise UserError(f"{NAME} is older: it has {min(strange)}. vllm-livepatch lock {folder} writes it anew")
        return joined(said, locked)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{NAME} is not as a tool writes it: {error!r}") from error


@lru_cache(maxsize=128)
def parsed(text: str) -> dict[str, Any]:
    """What a file says, its dates as texts: what is made of it is JSON. Raises TOMLDecodeError, PatchError.

    Remembered, for it takes most of the time of reading a folder: nobody changes what it holds.
    """
    try:
        found: dict[str, Any] = _without_dates(tomllib.loads(text))
    except RecursionError:
        raise PatchError("it is nested too deeply") from None
    return found


def _without_dates(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_dates(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_dates(one) for one in value]
    return value.isoformat() if isinstance(value, (date, time)) else value


def forms_of(lock: Mapping[str, Any], package: str) -> list[Form]:
    """The forms that a lock holds, with all their fingerprints; those of the patched package say no other."""
    common = lock.get("code", {})
    entries = [
        (str(entry.get("package", package)), entry) for entry in (*lock.get("variant", []), *lock.get("companion", []))
    ]
    others = {one for one, _ in entries} - {package}
    found = []
    for one, entry in entries:
        shared = {
            name: digest
            for name, digest in common.items()
            if (_top(name) == one if one != package else _top(name) not in others)
        }
        absent = entry.get("verdict") == "not-present"
        code = {**({} if absent else shared), **entry["code"]}
        found.append(Form(one, tuple(entry["releases"]), {name: digest for name, digest in code.items() if digest}))
    return found


def written(forms: Iterable[Form], package: str, names: Sequence[str]) -> str:
    """The text of a lock. `package` is the patched one, `names` the patch's targets and calls in their order."""
    own = [form for form in forms if form.package == package]
    others = [form for form in forms if form.package != package]
    common: dict[str, str] = {}
    tables = []
    for one in dict.fromkeys([package, *(form.package for form in others)]):
        of_one = own if one == package else [form for form in others if form.package == one]
        shared = _common([form.code for form in of_one if form.code or one == package])
        tables += [_table(form, package, names, shared) for form in of_one]
        common |= shared
    lines = ["[code]", *_lines({name: common[name] for name in names if name in common})] if common else []
    return "\n".join([_HEAD, *(["\n".join(lines) + "\n"] if lines else []), *tables])


def _table(form: Form, package: str, names: Sequence[str], common: Code) -> str:
    kind = "variant" if form.package == package else "companion"
    listed = ", ".join(f'"{release}"' for release in form.releases)
    head = [f"[[{kind}]]"]
    if kind == "companion":
        head.append(f'package = "{form.package}"')
        if not form.code:
            head.append('verdict = "not-present"')
            common = {}
    own = {name: form.code.get(name, "") for name in names if form.code.get(name, "") != common.get(name, "")}
    return "\n".join([*head, f"releases = [{listed}]", f"[{kind}.code]", *_lines(own)]) + "\n"


def _common(codes: Sequence[Code]) -> dict[str, str]:
    """What several have, where saying it once, and of the others that they have it not, takes fewer lines."""
    common: dict[str, str] = {}
    for name in dict.fromkeys(name for code in codes for name in code):
        most, count = Counter(code[name] for code in codes if name in code).most_common(1)[0]
        if 1 + len(codes) - count < sum(name in code for code in codes):
            common[name] = most
    return common


def _lines(code: Code) -> list[str]:
    return [f'"{name}" = "{digest}"' for name, digest in code.items()]


def _top(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def with_code(forms: Iterable[Form], package: str, release: str, code: Code) -> list[Form]:
    """The forms once a release has this code: it joins the one that has it, or is one of its own."""
    codes = {(form.package, one): form.code for form in forms for one in form.releases}
    return grouped({**codes, (package, release): code})


def grouped(codes: Mapping[tuple[str, str], Code]) -> list[Form]:
    """Releases, by package and version, as forms: the oldest release of each first, and so the forms."""
    found: list[tuple[str, list[str], Code]] = []
    for package, release in sorted(codes, key=lambda one: age(one[1])):
        code = dict(codes[package, release])
        same = [releases for of, releases, known in found if (of, known) == (package, code)]
        if same:
            same[0].append(release)
        else:
            found.append((package, [release], code))
    return [Form(package, tuple(releases), code) for package, releases, code in found]


def age(release: str) -> tuple[int, Version | str]:
    """What sorts releases, the oldest first."""
    try:
        return 0, Version(release)
    except InvalidVersion:
        return 1, release
