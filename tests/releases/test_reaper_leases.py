"""The NIXL half of `kv-block-reaper`, with each release's real NIXL workers: a lease that ends behind a renewed one.

Prefill's worker is told by real NIXL that one decode engine lives. On stock the other's lease, behind it, ends nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from prefill_decode_drive import nixl_site

PATCH = "kv-block-reaper"
DRIVER = "reaper_leases"
WITH_FAULT = [
    *("0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0"),
]
"""From the first release whose leases can be renewed on (vllm#58222)."""
FIXED = ["0.31.0", "0.32.0", "0.33.0"]
CASE = "behind_a_renewed_one"
READ = {"contents": ["its own"], "was_notified": True}
"""The renewed one is kept, and read."""


@pytest.mark.parametrize("release", executed.chosen(["0.30.0", "0.33.0"], [*WITH_FAULT, *FIXED]))
def test_stock(release: str, warm: interpreter.Interpreter, engine_python: Path, tmp_path: Path) -> None:
    """The patience is three times what the patch takes at most."""
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, path=[nixl_site(engine_python)], arguments=["3"])
    fixed = Version(release) >= Version(FIXED[0])
    assert run["cases"] == {CASE: {"let_go": ["p-dead"] if fixed else [], **READ}}


@pytest.mark.parametrize("release", executed.chosen(["0.22.1", "0.25.1", "0.30.0"], WITH_FAULT))
def test_patched(
    release: str, warm: interpreter.Interpreter, engine_python: Path, bundle: Path, tmp_path: Path
) -> None:
    path = [nixl_site(engine_python)]
    run = warm.run(DRIVER, {"vllm": release}, tmp_path, bundle=bundle, path=path, arguments=["60"])
    assert run["cases"] == {CASE: {"let_go": ["p-dead"], **READ}}
    patch: dict[str, Any] = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert patch["counters"] == {"stranded": 1}
