"""Debian's Prometheus and its promtool: on PATH, or fetched into the user's cache once, which takes no privileges."""

from __future__ import annotations

import fcntl
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from vllm_livepatch.tools import user_cache

PACKAGE = "prometheus"
NO_PROMETHEUS = "no Prometheus here"


@functools.cache
def find(program: str) -> Path | None:
    """`prometheus` or `promtool`, None where it is neither at hand nor to be had."""
    on_path = shutil.which(program)
    if on_path:
        return Path(on_path)
    kept = user_cache.directory() / PACKAGE
    kept.parent.mkdir(parents=True, exist_ok=True)
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # each worker of the tests may be the first
        if not kept.is_dir() and not _fetch(kept):
            return None
    return kept / "usr/bin" / program


def needed(program: str) -> Path:
    """The same, for a test that is not run without it."""
    found = find(program)
    if found is None:
        pytest.skip(f"{NO_PROMETHEUS}: {program}")
    return found


def _fetch(kept: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=kept.parent) as place:
        try:
            for command in (["apt-get", "download", PACKAGE], ["dpkg", "-x", "PACKAGE", "root"]):
                words = [str(next(Path(place).glob("*.deb"))) if word == "PACKAGE" else word for word in command]
                subprocess.run(words, cwd=place, check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError, StopIteration):
            return False
        Path(place, "root").rename(kept)
    return True
