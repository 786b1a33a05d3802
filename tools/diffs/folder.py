"""The folder of a patch that a diff becomes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomli_w
from vllm_livepatch.sitecustomize.facts import FORMAT
from vllm_livepatch.tools import patch_lock
from vllm_livepatch.tools.diffs.judging import Judged
from vllm_livepatch.tools.diffs.reading import Diff
from vllm_livepatch.tools.errors import UserError


def folder_of(name: str, out: Path) -> Path:
    """The folder of a new patch. Raises UserError where it cannot be one."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UserError(f"{name!r} is no patch name: use small letters, digits and hyphens")
    folder = out / name.replace("-", "_")
    if folder.exists():
        raise UserError(f"{folder} exists already")
    return folder


def write(diff: Diff, name: str, origin: str, judged: Sequence[Judged], out: Path) -> Path:
    """Write OUT/name_with_underscores/ whole or not at all. Raises UserError."""
    folder = folder_of(name, out)
    known = [item for item in judged if item.verdict != "drifted"]
    forms = patch_lock.grouped({(diff.package, item.release): item.code for item in known})
    have_it = [item.release for item in known if item.verdict != "needed"]
    facts = {
        "format": FORMAT,
        "title": f"The diff {origin}",
        "package": diff.package,
        "diff": "change.diff",
        "traced": True,  # for all that is known, torch.compile traces it: then its artifacts are kept apart
        "targets": [change.module for change in diff.changes if not change.added],
        "added": [change.module for change in diff.changes if change.added],
        "about": {
            "origin": origin,
            "files": [change.module for change in diff.changes],
            "set_aside": [f"{path}: {why}" for path, why in diff.aside],
            "drifted": [f"{item.release}: {item.detail}" for item in judged if item.verdict == "drifted"],
        },
        "variant": [{"releases": have_it, "verdict": "fixed-upstream", "applies": False}] if have_it else [],
    }
    names = list(dict.fromkeys(name for item in known for name in item.code))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=out) as temporary:
            new = Path(temporary, folder.name)
            new.mkdir()
            (new / "change.diff").write_text(diff.text, "utf-8", newline="\n")
            (new / "patch.toml").write_text(tomli_w.dumps(facts, multiline_strings=True), "utf-8")
            (new / patch_lock.NAME).write_text(patch_lock.written(forms, diff.package, names), "utf-8")
            new.rename(folder)
    except OSError as error:
        raise UserError(f"the patch cannot be written to {folder}: {error.strerror or error}") from error
    return folder
