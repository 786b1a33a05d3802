"""What a process says of one patch: by its state, its decision, and which of its parts are there."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.sitecustomize.decision import Decision, Patch, Variant
from vllm_livepatch.sitecustomize.patch_state import PatchState, PatchStates

NEEDED = Decision("needed", True, True, "needed", "")
FORCED = Decision("drifted", True, True, "forced", "is put on code that nobody verified")
REFUSED = Decision("drifted", False, True, "drifted", "somebody's edit")
OPTIONAL = Decision("needed", False, False, "optional", "off by default")
OLD = Variant({"engine.a:f": "1"}, ("1.0",))


def state(decision: Decision | None = None, **more: Any) -> PatchState:
    made = PatchState(Patch("one", "engine", "", ("engine.a:f", "engine.b:g"), (), (OLD,), **more))
    made.decision = decision
    return made


@pytest.mark.parametrize(
    ("decision", "there", "described"),
    [
        (None, 2, (None, None)),
        (NEEDED, 2, (None, None)),
        (FORCED, 2, ("forced", "is put on code that nobody verified")),
        (NEEDED, 1, ("partly", "1 of 2 targets imported so far")),
        (FORCED, 0, ("partly", "0 of 2 targets imported so far")),
    ],
)
def test_what_is_printed_of_a_patch_that_is_applied(
    decision: Decision | None, there: int, described: tuple[str | None, str | None]
) -> None:
    one = state(decision)
    one.settle_applied(there, 2, "targets")
    assert (one.state, one.reason, one.detail) == ("applied", *described)


@pytest.mark.parametrize(
    ("decision", "settled", "missing"),
    [
        (None, "armed", False),
        (NEEDED, "armed", False),
        (NEEDED, "applied", False),
        (NEEDED, "failed", True),
        (None, "failed", True),
        (REFUSED, "skipped", True),
        (REFUSED, "armed", False),
        (OPTIONAL, "skipped", False),
        (None, "skipped", False),
    ],
)
def test_missing_is_what_is_wanted_and_not_applied(decision: Decision | None, settled: str, missing: bool) -> None:
    one = state(decision)
    one.settle(settled)
    assert one.missing is missing


def test_what_status_shows() -> None:
    one = state(version=3)
    assert one.described() == {
        "name": "one",
        "version": 3,
        "state": "armed",
        "reason": None,
        "detail": None,
        "verdict": None,
        "targets": ["engine.a:f", "engine.b:g"],
        "counters": {},
    }
    one.decision = Decision("needed", True, True, "needed", "", OLD)
    one.context = PatchContext("one", {}, {}, lambda: None)
    one.context.count("calls")
    one.settle("failed", "raised", "refused with HF_TOKEN=abcdef")
    shown = one.described()
    assert (shown["targets"], shown["verdict"], shown["counters"]) == (["engine.a:f"], "needed", {"calls": 1})
    assert (shown["state"], shown["reason"], shown["detail"]) == ("failed", "raised", "refused with HF_TOKEN=***")
    one.context.count("calls")
    assert shown["counters"] == {"calls": 1}, "what was shown stays"


def test_the_patches_of_a_module() -> None:
    def facts(*targets: str, **more: Any) -> dict[str, Any]:
        return {"title": "one", "package": "engine", "targets": list(targets), "variant": [], **more}

    patches = PatchStates(
        {
            "second": facts("engine.b:g", "engine.a:C.h"),
            "first": facts("engine.a:f", calls=["engine.c:k"]),
            "adds": facts("engine.b", diff="change.diff", added=["engine.new"]),
        },
        {"LIVEPATCH_FIRST": "on"},
    )
    names = {
        module: [one.patch.name for one in patches.of(module)] for module in ("engine.a", "engine.b", "engine.new")
    }
    assert names == {"engine.a": ["first", "second"], "engine.b": ["adds", "second"], "engine.new": ["adds"]}
    assert patches.of("engine.c") == []
    assert patches.settings["toggles"] == {"first": "on"}
    before = patches.lock
    patches.new_lock()
    assert patches.lock is not before
