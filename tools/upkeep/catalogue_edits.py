"""A release more in the data: in the variants of a patch.toml, and in the release lists of the tests.

The files keep their looks: what is added is added to their text, and read back before it is written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from packaging.version import Version
from vllm_livepatch.sitecustomize.decision import Installed, Patch, judge, judge_companion
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.toml import tomllib

VARIANT = re.compile(r"^\[\[(?:variant|companion)\]\]\n(?:(?!\[\[).*\n?)*", re.MULTILINE)
_READ = re.compile(r"^read = \[[^\]]*\]\n", re.MULTILINE)
RELEASES = re.compile(r"^(releases = \[)([^\]]*)(\])", re.MULTILINE)
_CODE = re.compile(r'^"(?P<name>[^"]+)" = "(?:[0-9a-f]{16})?"\n?', re.MULTILINE)


def added(text: str, patch: Patch, package: str, found: Installed, version: str, previous: str) -> tuple[str, str]:
    """A patch.toml with the release `version` of one of the patch's packages in it, and what was done in a few words;
    the same text where nothing was.

    Code that a variant (of another package than the patched: a companion) has: the release joins it. Code that none
    has: one more, for a person to judge, that says what that of the release `previous` says, with the fingerprints of
    `found`. Raises UserError.
    """
    own = package == patch.package
    verdict, detail, form = judge(patch, found) if own else judge_companion(patch, package, found)
    kind = "variant" if own else "companion"
    segments = [one for one in VARIANT.finditer(text) if one.group().startswith(f"[[{kind}]]")]
    if not own:
        segments = [one for one in segments if f'package = "{package}"' in one.group()]
    forms = patch.forms(package)
    if verdict == "not-present" and form is None:
        return text, "not present, nothing to write"
    if form is not None and version in form.releases:
        return text, "listed already"
    try:
        if form is not None:
            segment = segments[forms.index(form)]
            new = RELEASES.sub(lambda match: match[1] + _with_release(match[2], version) + match[3], segment.group(), 1)
            after = text[: segment.start()] + new + text[segment.end() :]
            return _checked(text, after, kind, version), f"joins a {kind}"
        near = next(one for one in reversed(forms) if previous in one.releases)
        segment = segments[forms.index(near)]
        new = RELEASES.sub(rf'\g<1>"{version}"\g<3>', segment.group().rstrip("\n") + "\n", 1)
        new = _READ.sub("", new)  # of other releases: this one's tests decide
        common = tomllib.loads(text).get("code", {})
        code = {name: found.code[name] or "" for name in patch.names_of(package)}
        lines = "".join(f'"{name}" = "{digest}"\n' for name, digest in code.items() if digest != common.get(name, ""))
        first = _CODE.search(new)
        if first is None:
            raise UserError(f"{patch.name}: the {kind} of {previous} has no code that can be replaced")
        new = new[: first.start()] + lines + _CODE.sub("", new[first.start() :])
        whole = text[: segment.end()].rstrip("\n") + "\n\n" + new + text[segment.end() :].rjust(1, "\n").rstrip(" ")
        return _checked(text, _one_blank(whole), kind, version), f"a new {kind}, proposed: {detail}"
    except (StopIteration, IndexError) as error:
        raise UserError(f"{patch.name}: no {kind} has {package} {previous}; add {version} by hand") from error


def with_release(text: str, version: str, previous: str) -> str:
    """A file of test data in which every list that has the release `previous` has `version` behind it."""
    if f'"{version}"' in text:
        return text
    return re.sub(rf'("{re.escape(previous)}")(?=\s*[,\]])', rf'\1, "{version}"', text)


def without_release(text: str, version: str) -> str:
    """A file of test data, or a patch.toml, with the release in no list; variants that had no other are gone."""
    only = re.compile(rf'^releases = \["{re.escape(version)}",?\s*\]', re.MULTILINE)
    for segment in reversed(list(VARIANT.finditer(text))):
        if only.search(segment.group()):
            text = text[: segment.start()] + text[segment.end() :]
    text = re.sub(rf',\s*"{re.escape(version)}"(?=\s*[,\]])', "", text)
    return re.sub(rf'"{re.escape(version)}",\s*', "", text).replace(f'["{version}"]', "[]").rstrip("\n") + "\n"


def _with_release(listed: str, version: str) -> str:
    """The inside of a list of releases, oldest first, with one more."""
    for literal in re.finditer(r'"([^"]+)"', listed):
        if Version(literal[1]) > Version(version):
            return f'{listed[: literal.start()]}"{version}", {listed[literal.start() :]}'
    end = listed.rindex('"') + 1
    return f'{listed[:end]}, "{version}"{listed[end:]}'


def _one_blank(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _checked(before: str, after: str, kind: str, version: str) -> str:
    """The new text, if it differs from the old one by the release of one kind of table alone. Raises UserError."""
    old, new = tomllib.loads(before), tomllib.loads(after)
    same = {name: value for name, value in old.items() if name != kind} == {
        name: value for name, value in new.items() if name != kind
    }
    listed = [release for variant in new[kind] for release in variant["releases"]]
    kept = all(_stripped(variant, version) in [_stripped(one, version) for one in new[kind]] for variant in old[kind])
    if not (same and kept and listed.count(version) == 1):
        raise UserError("a patch.toml is written in a way that this command cannot add to; add the release by hand")
    return after


def _stripped(variant: dict[str, Any], version: str) -> dict[str, Any]:
    return {**variant, "releases": [release for release in variant["releases"] if release != version]}


def read(file: Path) -> str:
    """Raises UserError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
