"""The results that are kept under docs, as tests read them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Kept = dict[str, Any]


@functools.cache
def kept(name: str) -> Any:
    return json.loads((ROOT / f"docs/{name}.json").read_text("utf-8"))


def arms(name: str) -> list[Kept]:
    return list(kept(name)["arms"].values())


def counted(arm: Kept, patch: str, counter: str) -> int:
    """Over all processes of an arm."""
    patches = [entry for process in arm["status"] for entry in process["patches"] if entry["name"] == patch]
    return sum(entry["counters"].get(counter, 0) for entry in patches)


def right(*of: Kept) -> None:
    """What a sentence says of these arms: none failed, none differs."""
    assert not any(arm["failed"] or arm["mismatches"] for arm in of)


def again(arm: Kept) -> float:
    """How long after a part's return something was loaded again."""
    ((_, seconds),) = arm["loaded_again"]
    return float(seconds)
