"""vLLM releases, as they came, through loads that together are more than the pool: which shape stops which.

No patch of ours: see docs/loads.md. The worlds are in driver/load_deadlocks.py.
"""

from __future__ import annotations

from pathlib import Path

import interpreter
import pytest
from packaging.version import Version

STALLS = {
    "parts_at_once": [("0.14.1", "0.18.1")],
    "small_first_turn": [("0.14.1", "0.22.1")],
    "whole_prompts": [("0.14.1", "0.17.1")],
    "whole_prompts_speculative": [("0.14.1", "0.22.1"), ("0.25.1", "0.30.0")],
    "late_oldest": [("0.14.1", "0.30.0")],
    "late_oldest_without_a_hit": [("0.14.1", "0.30.0")],
    "urgent_newcomer": [("0.14.1", "0.30.0")],
}
"""The first and last release of each stretch that a shape stops."""
RELEASES = ["0.14.1", "0.18.1", "0.22.1", "0.24.0", "0.30.0", "0.31.0"]
"""Ends of stretches, and releases past them; the others were driven by hand, see docs/loads.md."""


@pytest.mark.parametrize("release", RELEASES)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Each shape stands still, with nothing running and no load under way, where it is said to and nowhere else."""
    worlds = warm.run("load_deadlocks", {"vllm": release}, tmp_path, arguments=["0", "600"])["worlds"]
    expected = {
        shape: any(Version(first) <= Version(release) <= Version(last) for first, last in stretches)
        for shape, stretches in STALLS.items()
    }
    for scheduler, played in worlds.items():
        stalls = {shape: world["outcome"].startswith("stalls") for shape, world in played.items()}
        assert stalls == expected, scheduler
