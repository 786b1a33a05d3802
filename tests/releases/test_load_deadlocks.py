"""vLLM releases, as they came, through loads that together are more than the pool: which shape stops which.

No patch of ours: see docs/load-deadlocks.md. The worlds are in driver/load_deadlocks.py.
"""

from __future__ import annotations

from pathlib import Path

import interpreter
import pytest
from packaging.version import Version

ENDS = {
    "parts_at_once": "0.19.1",
    "small_first_turn": "0.23.0",
    "whole_prompts": "0.14.1",
    "whole_prompts_speculative": "0.31.0",
    "late_oldest": "0.31.0",
    "late_oldest_without_a_hit": "0.31.0",
    "urgent_newcomer": "0.31.0",
}
"""The first release that a shape does not stop any more."""
RELEASES = ["0.14.1", "0.18.1", "0.19.1", "0.22.1", "0.23.0", "0.30.0", "0.31.0", "0.33.0"]
"""The first, the last, and on both sides of each end."""


@pytest.mark.parametrize("release", RELEASES)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Each shape stands still, with nothing running and every load arrived, up to the release that ends it."""
    worlds = warm.run("load_deadlocks", {"vllm": release}, tmp_path, arguments=["0", "600"])["worlds"]
    for scheduler, played in worlds.items():
        stalls = {shape: world["outcome"].startswith("stalls") for shape, world in played.items()}
        assert stalls == {shape: Version(release) < Version(end) for shape, end in ENDS.items()}, scheduler
        assert all(world["preemptions"] == 0 for shape, world in played.items() if stalls[shape]), scheduler
