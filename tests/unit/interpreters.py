"""The interpreters of this machine: on PATH as pythonX.Y, or below pyenv's versions directory."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit import debian
from tests.unit.support import PYTHON

SERVED = ("3.10", "3.11", "3.12", "3.13", "3.14")
UNSERVED = ("2.7", "3.6", "3.7", "3.8", "3.9")


@functools.cache
def find(version: str) -> str | None:
    """An interpreter of this version that starts, None where the machine has none."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return PYTHON
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    places = [found / "bin" / f"python{version}" for found in sorted(pyenv.glob(f"{version}*"), reverse=True)]
    on_path = shutil.which(f"python{version}")
    for candidate in [*map(str, places), *([on_path] if on_path else [])]:  # pyenv's shims on PATH may not start
        asked = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.stdout.strip() == version:
            return candidate
    return None


def found(versions: Sequence[str]) -> list[str]:
    return [version for version in versions if find(version)]


def missing(versions: Sequence[str]) -> list[str]:
    return [version for version in versions if not find(version)]


def each(versions: Sequence[str]) -> list[Any]:
    """All of them, to parametrize a test with: where the machine has none, it is skipped, and counted."""
    return [
        version
        if find(version)
        else pytest.param(version, marks=pytest.mark.skip(reason=f"{debian.NOT_HERE}Python {version}"))
        for version in versions
    ]
