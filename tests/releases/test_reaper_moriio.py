"""MoRI-IO up to 0.22.1 has no time-out: `kv-block-reaper` leaves its holds alone, unless it is told to end them.

A decode engine that gets to a request after ten minutes reads prefill's blocks, or has them written. Contents are compared.
"""

from __future__ import annotations

from pathlib import Path

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

PATCH = "kv-block-reaper"
RELEASES = [pin.version for pin in registry.pins("vllm") if Version(pin.version) <= Version("0.22.1")]
OWN, OTHERS = [1.0], [1.0, 2.0]
"""The contents of the request's own blocks, and with some of other requests."""


def arrived(warm: interpreter.Interpreter, release: str, work: Path, **given: object) -> dict[str, list[float]]:
    """What decode has in its blocks, by the way that it came."""
    options: dict[str, object] = {"arguments": ["1"], "path": [interpreter.STANDINS], **given}
    found: dict[str, list[float]] = warm.run("reaper_moriio", {"vllm": release}, work, **options)["cases"]
    return found


@pytest.mark.parametrize("release", executed.chosen(["0.20.2", "0.22.1"], RELEASES))
def test_stock_is_right(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    assert arrived(warm, release, tmp_path) == {"read": OWN, "write": OWN}


@pytest.mark.parametrize("release", executed.chosen(["0.20.2", "0.22.1"], RELEASES))
def test_patched_is_right(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    assert arrived(warm, release, tmp_path, bundle=bundle) == {"read": OWN, "write": OWN}
    assert interpreter.reported(tmp_path, PATCH)["counters"].get("reaped", 0) == 0


@pytest.mark.parametrize("release", executed.chosen(["0.22.1"], RELEASES))
def test_told_to_free_by_age_it_is_not(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """Why it is not on by itself."""
    environ = {"LIVEPATCH_KV_BLOCK_REAPER": "on"}
    assert arrived(warm, release, tmp_path, bundle=bundle, environ=environ) == {"read": OTHERS, "write": OTHERS}
