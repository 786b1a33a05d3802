"""Programs of Debian that a few tests run: on PATH, or fetched into the user's cache once, which takes no privileges."""

from __future__ import annotations

import fcntl
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from vllm_livepatch.tools import user_cache

_SLURM = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2", "libhwloc15")
PACKAGES = {
    "prometheus": ("prometheus",),
    "promtool": ("prometheus",),
    "prometheus-node-exporter": ("prometheus-node-exporter",),
    "bwrap": ("bubblewrap",),
    "slurmctld-wlm": _SLURM,  # what Debian's /usr/sbin/slurmctld leads to
}
"""Each program's, and the libraries that a machine may lack."""
NOT_HERE = "not to be had here: "
"""What the reason of a skipped test begins with; the summary counts them by what follows."""


@functools.cache
def find(program: str) -> Path | None:
    """A program, None where it is neither at hand nor to be had."""
    on_path = shutil.which(program)
    if on_path:
        return Path(on_path)
    packages = PACKAGES[program]
    kept = user_cache.directory() / packages[0]
    kept.parent.mkdir(parents=True, exist_ok=True)
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # each worker of the tests may be the first
        if not kept.is_dir() and not _fetch(packages, kept):
            return None
    return next(
        (kept / place / program for place in ("usr/bin", "usr/sbin") if (kept / place / program).exists()), None
    )


def needed(program: str) -> Path:
    """The same, for a test that is not run without it."""
    return find(program) or lack(program)


def lack(what: str) -> NoReturn:
    """Skip the test, and have it counted."""
    pytest.skip(f"{NOT_HERE}{what}")


def _fetch(packages: Sequence[str], kept: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=kept.parent) as place:
        try:
            _run(["apt-get", "download", *packages], place)
            for file in Path(place).glob("*.deb"):
                _run(["dpkg", "-x", str(file), "root"], place)
            Path(place, "root").rename(kept)
        except (OSError, subprocess.SubprocessError):
            return False
    return True


def _run(command: list[str], place: str) -> None:
    subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=120)
