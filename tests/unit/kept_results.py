"""The results that are kept in tests/results, as tests read them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Kept = dict[str, Any]


@functools.cache
def kept(name: str) -> Any:
    return json.loads((ROOT / f"tests/results/{name}.json").read_text("utf-8"))


def setups(name: str) -> list[Kept]:
    return list(kept(name)["setups"].values())


def counted(setup: Kept, patch: str, counter: str) -> int:
    """Over all processes of a setup."""
    patches = [entry for process in setup["status"] for entry in process["patches"] if entry["name"] == patch]
    return sum(entry["counters"].get(counter, 0) for entry in patches)


def right(*of: Kept) -> None:
    """What a sentence says of these setups: none failed, none differs."""
    assert not any(setup["failed"] or setup["mismatches"] for setup in of)


def again(setup: Kept) -> float:
    """How long after a part's return something was loaded again."""
    ((_, seconds),) = setup["loaded_again"]
    return float(seconds)
