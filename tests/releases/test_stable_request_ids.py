"""Every pinned vLLM release's front end and engine core, met by requests of one id, stock and patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from prefill_decode_drive import RELEASES, Run, drive, shared_directory

PATCH = "stable-request-ids"
ANSWERED = {"first": "answered"}
REFUSED = {**ANSWERED, "second": "refused: VLLMValidationError"}
FAILS = {**ANSWERED, "second": "fails"}
AGAIN = {
    "again_amid_steps": {"first": "abort", "second": "answered"},
    "again_amid_steps_at_another_server": {"first": "abort", "second": "answered"},
    "again_after_the_last_step_began": {"first": "abort", "second": "answered"},
    "gone_while_waiting": {"first": "abort", "second": "abort", "third": "answered"},
    "again_amid_outputs": {"first": "abort", "second": "answered"},
    "again_before_the_second_look_at_the_abort": {"first": "answered", "second": "abort", "third": "answered"},
    "again_before_the_abort_is_sent": {"first": "stop", "second": "answered"},
}
"""What becomes of an id that is used again while something of its former request is under way, patched."""
SAFE = {
    "session": ANSWERED,
    "one_after_another": {"first": "answered", "second": "answered", "third": "answered"},
}
NO_SESSION = {"first": "no such thing"}


@pytest.fixture
def run(
    warm: interpreter.Interpreter, engine_python: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The function that gives a release's run of a manner."""

    def of(release: str, manner: str) -> Run:
        return drive(release, manner, warm, engine_python, bundle, shared_directory(tmp_path_factory))

    return of


def on_stock(release: str) -> dict[str, Any]:
    """What becomes of repeated ids that are kept without a check, as the release's own switch keeps them from 0.17."""
    switch = "kept" if Version(release) >= Version("0.17") else "each its own"
    named = {"named": "each its own", "named_with_switch": switch, **again_on_stock(release)}
    if release == "0.14.1":
        dead = {"engine": "AssertionError in get_num_blocks_to_allocate"}
        return {
            **named,
            "second_live": {**ANSWERED, "second": "refused: ValueError"},
            "second_of_other_server": dead,
            "second_while_held": dead,
            # The error is right; the abort with which releases from 0.31 answer it is not.
            "second_of_samples": {"first": "2 of 12 tokens", "second": "refused: ValueError"},
            "second_of_session": NO_SESSION,
            **SAFE,
            "session": NO_SESSION,
        }
    dead = {"engine": "AssertionError in add_request"}
    return {
        **named,
        "second_live": dead,
        "second_of_other_server": dead,
        "second_while_held": dead,
        "second_of_samples": dead,
        # The session's client gets what the other one asked for.
        "second_of_session": {"first": "12 of 6 tokens", "second": "never answered"},
        **SAFE,
    }


def again_on_stock(release: str) -> dict[str, Any]:
    """What becomes of an id that is used again too soon, where its requests are told apart by nothing else."""
    taken = {"first": "abort", "second": "tokens of another request"}
    # To 0.32 the scheduler counts the tokens that are under way, and asserts; 0.33 takes the dead request's.
    dead = {"engine": "AssertionError in _update_request_with_output"}
    second = "KeyError in _update_after_schedule" if release == "0.14.1" else "AssertionError in add_request"
    return {
        "again_amid_steps": taken,
        "again_amid_steps_at_another_server": taken,
        "again_after_the_last_step_began": taken if Version(release) >= Version("0.33") else dead,
        # The abort of the request before ends the one after, which nobody answers.
        "gone_while_waiting": {"first": "abort", "second": "abort", "third": "never answered"},
        "again_amid_outputs": taken,
        "again_before_the_second_look_at_the_abort": {
            "first": "answered",
            "second": "abort",
            "third": "never answered",
        },
        "again_before_the_abort_is_sent": {"engine": second},
    }


def when_patched(release: str) -> dict[str, Any]:
    """What becomes of them with the patch: the second is refused, all else goes on."""
    # The engine core of 0.33 can tell a client why; before, it can only fail the request, and log why.
    by_core = REFUSED if Version(release) >= Version("0.33") else FAILS
    return {
        "named": "kept",
        "named_with_switch": "kept",
        **AGAIN,
        "second_live": REFUSED,
        "second_of_other_server": by_core,
        "second_while_held": {**by_core, "third": "answered"},
        "second_of_samples": REFUSED,
        "second_of_session": NO_SESSION if release == "0.14.1" else REFUSED,
        **SAFE,
        "session": NO_SESSION if release == "0.14.1" else ANSWERED,
    }


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_stock(release: str, run: Any) -> None:
    """Prefill and decode name a request differently; kept ids without a check let a repeated one end the engine."""
    assert run(release, "stock").ids == on_stock(release)


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_patched(release: str, run: Any) -> None:
    """Both see the router's id, and a repeated one is an error for the second request alone."""
    patched = run(release, "patched")
    assert patched.ids == when_patched(release)
    patch = patched.patches[PATCH]
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    live = 3 if release == "0.14.1" else 4
    waited = patch["counters"].pop("waited")
    assert waited >= len(AGAIN) - 1, "the driver has one case in which nothing waits"
    assert patch["counters"] == {"refused_live": live, "refused_held": 1}


def test_not_asked(run: Any) -> None:
    """Nothing happens unless it is asked for: ids stay each engine's own."""
    patched = run("0.32.0", "not asked")
    assert patched.ids == on_stock("0.32.0")
    patch = patched.patches[PATCH]
    assert (patch["state"], patch["reason"], patch["verdict"]) == ("skipped", "optional", "needed"), patch
