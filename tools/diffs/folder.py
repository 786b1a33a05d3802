"""The folder of a patch that a diff becomes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from vllm_livepatch.sitecustomize.facts import FORMAT
from vllm_livepatch.tools import patch_lock
from vllm_livepatch.tools.diffs.judging import Judged
from vllm_livepatch.tools.diffs.reading import Diff
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.toml import tomllib

DIFF = "change.diff"
OURS = ("format", "package", "diff", "targets", "added", "variant")
"""What a folder's patch.toml has of the diff alone. The rest may be a person's: who makes the folder anew keeps it."""


def folder_of(name: str, out: Path) -> Path:
    """The folder of a patch, new or made of a diff before. Raises UserError where it cannot be one."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UserError(f"{name!r} is no patch name: use small letters, digits and hyphens")
    folder = out / name.replace("-", "_")
    if folder.exists() and not (folder / DIFF).is_file():
        raise UserError(f"{folder} exists already, and was not made of a diff")
    return folder


def _before(folder: Path, diff: Diff) -> tuple[dict[str, Any], dict[str, Judged]]:
    """What a folder that is there says, and how this same diff was judged before. Raises UserError."""
    if not folder.exists():
        return {}, {}
    try:
        said = tomllib.loads((folder / "patch.toml").read_text("utf-8"))
        if (folder / DIFF).read_text("utf-8") != diff.text:
            return said, {}
        forms = patch_lock.forms_of(tomllib.loads((folder / patch_lock.NAME).read_text("utf-8")), diff.package)
        have_it = {one for entry in said.get("variant", []) for one in entry["releases"]}
        verdicts = {one: "fixed-upstream" if one in have_it else "needed" for form in forms for one in form.releases}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder} cannot be read, and is not made anew: {error}") from error
    return said, {one: Judged(one, verdicts[one], dict(form.code)) for form in forms for one in form.releases}


def _drifted(judged: Sequence[Judged], before: Sequence[str]) -> list[str]:
    """Where the diff does not apply, and why; `before` is what the folder says of that."""
    now = {item.release for item in judged}
    others = [line for line in before if line.partition(":")[0] not in now]
    return others + [f"{item.release}: {item.detail}" for item in judged if item.verdict == "drifted"]


def write(diff: Diff, name: str, origin: str, judged: Sequence[Judged], out: Path) -> Path:
    """Write OUT/name_with_underscores/ whole or not at all. Raises UserError."""
    folder = folder_of(name, out)
    said, before = _before(folder, diff)
    known = [
        item for item in {**before, **{item.release: item for item in judged}}.values() if item.verdict != "drifted"
    ]
    forms = patch_lock.grouped({(diff.package, item.release): item.code for item in known})
    have_it = [item.release for item in known if item.verdict != "needed"]
    facts: dict[str, Any] = {
        "format": FORMAT,
        "title": f"The diff {origin}",
        "package": diff.package,
        "diff": DIFF,
        "traced": True,  # for all that is known, torch.compile traces it: then its artifacts are kept apart
        "targets": [change.module for change in diff.changes if not change.added],
        "added": [change.module for change in diff.changes if change.added],
        "about": {
            "origin": origin,
            "files": [change.module for change in diff.changes],
            "set_aside": [f"{path}: {why}" for path, why in diff.aside],
            "drifted": _drifted(judged, said.get("about", {}).get("drifted", []) if before else []),
        },
    }
    if have_it:
        facts["variant"] = [{"releases": have_it, "verdict": "fixed-upstream", "applies": False}]
    about = {**said.get("about", {}), **facts["about"], "origin": said.get("about", {}).get("origin", origin)}
    facts = {**facts, **{name: value for name, value in said.items() if name not in OURS}, "about": about}
    names = list(dict.fromkeys(name for item in known for name in item.code))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=out) as temporary:
            new = Path(temporary, folder.name)
            new.mkdir()
            (new / DIFF).write_text(diff.text, "utf-8", newline="\n")
            (new / "patch.toml").write_text(tomli_w.dumps(facts, multiline_strings=True), "utf-8")
            (new / patch_lock.NAME).write_text(patch_lock.written(forms, diff.package, names), "utf-8")
            old = Path(temporary, "old")
            if folder.exists():
                folder.rename(old)  # it goes with the temporary directory
            try:
                new.rename(folder)
            except OSError:
                if old.exists():
                    old.rename(folder)
                raise
    except OSError as error:
        raise UserError(f"the patch cannot be written to {folder}: {error.strerror or error}") from error
    return folder
