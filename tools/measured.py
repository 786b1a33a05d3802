"""When, with which revision and on which machine something was measured: every figure that is kept says so."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any


def measured_on(checkout: Path, gpu: str | None = None) -> dict[str, Any]:
    """Today, the checkout's revision, and this machine, with its GPU where that was used."""
    revision = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    parts = [f"{os.cpu_count()} cores", f"{platform.machine()}{_vectors()}", gpu, f"Python {platform.python_version()}"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "revision": revision or None,
        "machine": ", ".join(filter(None, parts)),
    }


def _vectors() -> str:
    """The widest vector instructions of the processor, on which an engine's speed on CPU depends; "" if unknown."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return ""
    names = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((f" with {name}" for flag, name in names.items() if flag in flags), "")
