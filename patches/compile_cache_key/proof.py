"""The keys of what a release compiles, before and after a patch changes, in memory, code that torch.compile traces.

The bundle of a proof has no other patch: it is made to take it that there is one which changes traced code.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import compile_cache_key as driver

PATCH_SET = "5" * 64


def cases() -> dict[str, str | None]:
    """What each key tells of code that no file on disk shows."""
    before = driver.found()
    change_traced_code()
    after = driver.found()
    return {
        "where no patch changes traced code, all keys are the release's own": _unless_own(before),
        "where one does, what the release's own keys are made of is still in them": None
        if after["same"]
        else "factors of the release's own are gone",
        "compiled graphs of changed code have a key of their own": None
        if after["added"]
        else "changed code loads the graphs of unchanged code, and leaves its own to it",
        "ahead-of-time artifacts of changed code have a key of their own": None
        if after["artifact has patched"] and not after["artifact has stock"]
        else "changed code loads the artifacts of unchanged code, and leaves its own to it",
        "what is known of a model's class is kept apart for changed code": None
        if after["model file"] != after["stock model file"]
        else f"changed code reads and writes {after['model file']} as unchanged code does",
    }


def _unless_own(found: Mapping[str, Any]) -> str | None:
    own = found["same"] and not found["added"] and found["artifact has stock"]
    return None if own and found["model file"] == found["stock model file"] else "keys are others"


def change_traced_code() -> None:
    """Have the bundle, where there is one, take it that a patch of it changes traced code. No file on disk changes."""
    for one in gc.get_objects():
        if type(one).__name__ == "PatchContext" and hasattr(one, "patch_set"):
            one.patch_set = lambda: PATCH_SET
