"""Each LMCache that forgets silent workers: a real server, a real worker, CPU memory with contents, and a silence.

The server is the release's own, in a process of its own, and without the bundle's patches: these are of the worker. Its
compiled modules are those of the release that is installed, since pinned sources have none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools import registry

DRIVER = "lmcache_reregister"
PATCH = "lmcache-reregister"
RELEASES = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.5.0")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel."""

RIGHT = {"hit": 64, "loaded": True, "failed": [], "right": True}
"""What was stored is found, and loaded as it was."""

UNANSWERED = "raises: "
"""The engine's step ends with an error: PREPARE_STORE was not answered within mq_timeout."""

STOCK = {
    "well": RIGHT,
    "never_pinged": UNANSWERED,
    "stopped": UNANSWERED,
    "in_the_midst": {"hit": 64, "load": [["b"], []]},
}
PATCHED = {
    "well": RIGHT,
    "never_pinged": {**RIGHT, "known": 1},
    "stopped": {**RIGHT, "before": [64], "known": 1},
    "in_the_midst": {"hit": 64, "load": [["b"], [5, 6, 7, 8]]},
    "silent_and_known": [RIGHT, RIGHT, 1],
    "server_gone": [["a"], ["b"], [5, 6, 7, 8]],
    "preempted": ["earlier", "now"],
    "event_left_out": [None, [], True],
}


def driven(
    release: str, warm: interpreter.Interpreter, work: Path, *names: str, bundle: Path | None = None
) -> dict[str, Any]:
    releases = {"vllm": "0.29.0"} if release == INSTALLED else {"vllm": "0.29.0", "lmcache": release}
    environ = {"LIVEPATCH_LMCACHE_REREGISTER_SILENT_SECONDS": "0.4"}
    cases: dict[str, Any] = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ, arguments=names)["cases"]
    return cases


@pytest.mark.parametrize("release", RELEASES)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """A forgotten worker is refused for ever: a store in a step ends that step with an error."""
    found = driven(release, warm, tmp_path, *STOCK)
    unanswered = {name for name, case in found.items() if str(case).startswith(UNANSWERED)}
    assert all("PREPARE_STORE timed out" in found[name] for name in unanswered)
    assert {**found, **dict.fromkeys(unanswered, UNANSWERED)} == STOCK


@pytest.mark.parametrize("release", RELEASES)
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """It registers again before it asks for anything; what may be wrong is reported as failed."""
    assert driven(release, warm, tmp_path, bundle=bundle) == PATCHED
    (patch,) = [one for one in reports(tmp_path) if one["state"] == "applied"]
    assert patch["verdict"] == "needed", patch
    assert patch["counters"]["load_in_doubt"] == 1
    assert patch["counters"]["registered_again"] >= 4


def reports(work: Path) -> list[dict[str, Any]]:
    """What each process of the run reported of the patch; the servers import no target."""
    return [interpreter.read(file, PATCH) for file in (work / "state").glob("*.json")]
