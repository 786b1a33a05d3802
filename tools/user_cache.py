"""The directory below the user's cache directory that is this tool's; those who use it make it."""

from __future__ import annotations

import os
from pathlib import Path


def directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "vllm-livepatch"
