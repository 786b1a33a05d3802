"""Each LMCache that forgets silent workers: a real server, a real worker, CPU memory with contents, and a silence.

For a silence the clocks of both are set forward (driver/lmcache_reregister.py).

The server is the release's own, in a process of its own. Its compiled modules are those of the release that is installed,
since pinned sources have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_reregister"
PATCH = "lmcache-reregister"
RELEASES = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.5.0")]
EARLIER = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) < Version("0.5.0")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel."""

RIGHT = {"hit": 64, "loaded": True, "failed": [], "right": True}
"""What was stored is found, and loaded as it was."""

UNANSWERED = "PREPARE_STORE timed out"
"""The engine's step ends with an error: PREPARE_STORE was not answered within mq_timeout."""

NOT_THERE = {"reported": [[["not there"], [5, 6, 7, 8]], True], "unreported": [[["not there"], []], True]}
"""The load has ended, and its blocks hold what they held: reported as failed, or not, by LMCache itself to 0.5.4."""

IN_THE_MIDST = {"hit": 64, "forgotten": [True], "loaded": ["b"]}
IN_DOUBT = {**IN_THE_MIDST, "failed": [["b"], [5, 6, 7, 8]]}
STOCK: dict[str, Any] = {
    "stopped": UNANSWERED,
    "by_a_heartbeat": {"forgotten": [True, True], "known": [0, 0]},
    "in_the_midst": {**IN_THE_MIDST, "failed": [[], []]},
}
PATCHED: dict[str, Any] = {
    "well": RIGHT,
    "not_there": NOT_THERE["reported"],
    "never_pinged": {**RIGHT, "forgotten": True, "known": 1},
    "stopped": {**RIGHT, "before": 64, "forgotten": True, "known": 1},
    "by_a_heartbeat": {"forgotten": [True, True], "known": [1, 0]},
    "in_the_midst": IN_DOUBT,
    "in_the_midst_renewed": IN_DOUBT,
    "in_the_midst_recovered": IN_DOUBT,
    "in_a_registration": [True, RIGHT, True, RIGHT],
    "registration_fails": [[["c"], ["d"], [5, 6, 7, 8]], RIGHT],
    "under_way": [[[], []], [["e"], []]],
    "silent_and_known": [RIGHT, False, RIGHT, 1],
    "between_heartbeats": [RIGHT, 0],
    "busy": [RIGHT, RIGHT, 0],
    "preempted": ["earlier", "now"],
    "event_left_out": [None, [], True],
    "shut_down": [True, 0],
    "server_gone": [["a"], ["b"], [5, 6, 7, 8], True],
}


def driven(
    release: str,
    warm: interpreter.Interpreter,
    work: Path,
    *names: str,
    bundle: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    releases = {"vllm": "0.29.0"} if release == INSTALLED else {"vllm": "0.29.0", "lmcache": release}
    cases: dict[str, Any] = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ, arguments=names)["cases"]
    return cases


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """A forgotten worker is refused for ever: a store in a step ends that step with an error."""
    found = driven(release, warm, tmp_path, "not_there", *STOCK)
    assert found.pop("not_there") == NOT_THERE["unreported" if Version(release) < Version("0.5.5") else "reported"]
    assert UNANSWERED in found["stopped"]
    assert {**found, "stopped": UNANSWERED} == STOCK


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """It registers again before it asks for anything; what may be wrong is reported as failed."""
    assert driven(release, warm, tmp_path, bundle=bundle) == PATCHED
    (patch,) = [one for one in reports(tmp_path) if one["state"] == "applied"]
    assert patch["verdict"] == "needed", patch
    preempts, events = Version(release) >= Version("0.5.2"), Version(release) >= Version("0.5.5")
    # Once more where a ping is not answered in time, on a machine that is busy: that worker was lost, and registers too.
    assert patch["counters"].pop("registered_again") >= 9 + preempts
    assert patch["counters"] == {"load_in_doubt": 3, "left_out": 12 if events else 5}


def test_alone(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Without the other patches of this worker. To 0.5.4 nobody else reports a load in doubt as failed."""
    off = dict.fromkeys(("LIVEPATCH_LMCACHE_FAILED_LOADS", "LIVEPATCH_LMCACHE_BOUNDED_WAITS"), "off")
    expected = {**PATCHED, "not_there": NOT_THERE["unreported"]}
    assert driven("0.5.4", warm, tmp_path, bundle=bundle, environ=off) == expected


@pytest.mark.parametrize("release", executed.chosen(EARLIER[-1:], EARLIER))
def test_before_servers_forgot(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """To 0.4.7 a server knows a worker as long as it runs (driver/lmcache_never_forgets.py)."""
    cases = warm.run("lmcache_never_forgets", {"vllm": "0.29.0", "lmcache": release}, tmp_path)["cases"]
    assert cases == {"before": [4711], "after": [4711], "answers": [256, 256]}


def reports(work: Path) -> list[dict[str, Any]]:
    """What each process of the run reported of the patch; the servers import no target."""
    return [interpreter.read(file, PATCH) for file in (work / "state").glob("*.json")]
