"""The real scheduler, executed from elsewhere than its package's folder or past the bundle: judged by what is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest

RELEASES = executed.ends(["0.21.0", "0.32.0", "0.33.0"])
FUNCTION = "_free_blocks"
PATCH = "stale-finished-recving"
TARGET = f"vllm.v1.core.sched.scheduler:Scheduler.{FUNCTION}"


def driven(
    warm: interpreter.Interpreter, release: str, bundle: Path, work: Path, way: str, mode: str = "auto"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was imported, and what the process reports of the patch."""
    work.mkdir()
    arguments, environ = [way, FUNCTION], {"LIVEPATCH": mode}
    given = {"vllm": release}
    found = warm.run("executed_text", given, work, bundle=bundle, environ=environ, arguments=arguments)
    return found, interpreter.reported(work, PATCH)


def ends(warm: interpreter.Interpreter, release: str, bundle: Path, work: Path, way: str) -> str:
    """What a process writes to stderr that strict ends."""
    with pytest.raises(AssertionError, match="ended with 78"):
        driven(warm, release, bundle, work, way, "strict")
    return (work / "stderr").read_text("utf-8")


@pytest.mark.parametrize("release", RELEASES)
def test_a_redirecting_finder(release: str, bundle: Path, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    found, reported = driven(warm, release, bundle, tmp_path / "same", "same", "strict")
    assert (reported["state"], reported["verdict"]) == ("applied", "needed")
    assert (found["wrapped"], found["inherited"], Path(found["file"]).name) == (True, True, "overlay.py")
    found, reported = driven(warm, release, bundle, tmp_path / "other", "other")
    assert (reported["state"], reported["verdict"]) == ("skipped", "drifted")
    assert f"code that was never verified: {TARGET}" in reported["detail"]
    assert (found["wrapped"], Path(found["file"]).name) == (False, "overlay.py")
    assert " is not applied (drifted): " in ends(warm, release, bundle, tmp_path / "strict", "other")


@pytest.mark.parametrize("release", RELEASES)
def test_a_finder_in_front_of_the_bundles(
    release: str, bundle: Path, warm: interpreter.Interpreter, tmp_path: Path
) -> None:
    found, reported = driven(warm, release, bundle, tmp_path / "auto", "in front")
    assert not found["wrapped"]
    assert (reported["state"], reported["reason"]) == ("failed", "bypassed")
    assert " is not applied (bypassed): " in ends(warm, release, bundle, tmp_path / "strict", "in front")


@pytest.mark.parametrize("release", RELEASES)
def test_a_finder_that_replaces_a_target_as_it_is_imported(
    release: str, bundle: Path, warm: interpreter.Interpreter, tmp_path: Path
) -> None:
    found, reported = driven(warm, release, bundle, tmp_path / "auto", "pasted")
    assert not found["wrapped"]
    assert (reported["state"], reported["reason"]) == ("failed", "overwritten")
    error = ends(warm, release, bundle, tmp_path / "strict", "pasted")
    assert f"LIVEPATCH=strict: {PATCH} is not applied (overwritten): {TARGET} was replaced" in error
