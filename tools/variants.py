"""A release more in the data: in the variants of a patch.toml, and in the release lists of the tests.

The files keep their looks: what is added is added to their text, and read back before it is written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from packaging.version import Version
from vllm_livepatch.sitecustomize.decision import Installed, Patch, judge
from vllm_livepatch.tools.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VARIANT = re.compile(r"^\[\[variant\]\]\n(?:(?!\[\[).*\n?)*", re.MULTILINE)
_RELEASES = re.compile(r"^(releases = \[)([^\]]*)(\])", re.MULTILINE)
_CODE = re.compile(r'^"(?P<name>[^"]+)" = "[0-9a-f]{16}"\n?', re.MULTILINE)


def added(text: str, patch: Patch, found: Installed, version: str, previous: str) -> tuple[str, str]:
    """A patch.toml with the release `version` in it, and what was done in a few words; the same text where nothing was.

    Code that a variant has: the release joins it. Code that none has: a variant more, for a person to judge, that says
    what the variant of the release `previous` says, with the fingerprints of `found`. Raises UserError.
    """
    verdict, detail, variant = judge(patch, found)
    segments = list(_VARIANT.finditer(text))
    if verdict == "not-present" and variant is None:
        return text, "not present, nothing to write"
    if variant is not None and version in variant.releases:
        return text, "listed already"
    try:
        if variant is not None:
            segment = segments[patch.variants.index(variant)]
            new = _RELEASES.sub(
                lambda match: match[1] + _with_release(match[2], version) + match[3], segment.group(), 1
            )
            return _checked(text, text[: segment.start()] + new + text[segment.end() :], version), "joins a variant"
        near = next(one for one in reversed(patch.variants) if previous in one.releases)
        segment = segments[patch.variants.index(near)]
        new = _RELEASES.sub(rf'\g<1>"{version}"\g<3>', segment.group().rstrip("\n") + "\n", 1)
        lines = "".join(f'"{name}" = "{print_}"\n' for name, print_ in found.code.items() if print_ is not None)
        first = _CODE.search(new)
        if first is None:
            raise UserError(f"{patch.name}: the variant of {previous} has no code that can be replaced")
        new = new[: first.start()] + lines + _CODE.sub("", new[first.start() :])
        whole = text[: segment.end()].rstrip("\n") + "\n\n" + new + text[segment.end() :].rjust(1, "\n").rstrip(" ")
        return _checked(text, _one_blank(whole), version), f"a new variant, proposed: {detail}"
    except (StopIteration, IndexError) as error:
        raise UserError(f"{patch.name}: no variant has vLLM or LMCache {previous}; add {version} by hand") from error


def with_release(text: str, version: str, previous: str) -> str:
    """A file of test data in which every list that has the release `previous` has `version` behind it."""
    if f'"{version}"' in text:
        return text
    return re.sub(rf'("{re.escape(previous)}")(?=\s*[,\]])', rf'\1, "{version}"', text)


def without_release(text: str, version: str) -> str:
    """A file of test data, or a patch.toml, with the release in no list; variants that had no other are gone."""
    only = re.compile(rf'^releases = \["{re.escape(version)}",?\s*\]', re.MULTILINE)
    for segment in reversed(list(_VARIANT.finditer(text))):
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


def _checked(before: str, after: str, version: str) -> str:
    """The new text, if it differs from the old one by the release alone. Raises UserError."""
    old, new = tomllib.loads(before), tomllib.loads(after)
    same = {name: value for name, value in old.items() if name != "variant"} == {
        name: value for name, value in new.items() if name != "variant"
    }
    listed = [release for variant in new["variant"] for release in variant["releases"]]
    kept = all(
        _stripped(variant, version) in [_stripped(one, version) for one in new["variant"]] for variant in old["variant"]
    )
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
