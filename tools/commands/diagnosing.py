"""`doctor`: what a bundle says of an interpreter, asked as that one is started here."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.verifying import MANIFEST


def run(place: Path | None, python: str, as_json: bool) -> int:
    """Have the bundle examine the interpreter; its exit code. Raises UserError."""
    if place is None:
        place = on_path()
        if place is None:
            raise UserError("no bundle is on PYTHONPATH, so that nothing would be patched; --bundle DIR names one")
    elif not is_bundle(place):
        raise UserError(f"{place} is no bundle")
    words = [python, str(place), "doctor", *(["--json"] if as_json else [])]
    try:
        return subprocess.run(words).returncode
    except OSError as error:
        raise UserError(f"{python} cannot be started: {error.strerror}") from error


def on_path() -> Path | None:
    """The first bundle on PYTHONPATH, which is the one that serves."""
    places = map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    return next((place for place in places if is_bundle(place)), None)


def is_bundle(place: Path) -> bool:
    """A directory that `generate` wrote, or a zip file of one."""
    if not place.is_file():
        return (place / MANIFEST).is_file()
    try:
        with zipfile.ZipFile(place) as archive:
            return MANIFEST in archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return False
