"""Real schedulers of both kinds, of whose loads some fail: in the step itself or beside it, with one group or two.

The model reads what a request attends to, and samples a wrong token where that is not the request's own KV.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import failed_loads as driver
from result import NotBuilt
from vllm.config import KVTransferConfig

SENTENCES = {
    "now": "a load fails in the step that needs it",
    "now_first": "a load of which nothing arrives fails in the step that needs it",
    "now_shared": "a load fails in the step that needs it, and others have the same prompt",
    "now_aborted": "the client hangs up before the failure is known, and others have the same prompt",
    "now_reset": "all requests are preempted before the failure is known",
    "now_resumed": "a preempted request loads again, which fails, and is preempted once more",
    "now_fail": "a load fails in the step that needs it, where such requests are to end",
    "asked_fail": "a load fails in the step that needs it, and an operator's command line has such requests end",
    "asked_nothing": "a load fails in the step that needs it, and an operator's command line has no policy",
    "later": "a load beside the steps fails",
    "later_first": "a load beside the steps fails, and nothing of it arrived",
    "later_small_pool_idle": "a load fails, and an older request is to load into a pool of one prompt",
    "later_fail": "a load beside the steps fails, where such requests are to end",
    "later_idle": "the only request's load fails, where such requests are to end",
    "groups_now": "of two KV cache groups, the full one's load fails in the step that needs it",
    "groups_now_window": "of two KV cache groups, the load of the one with a window fails in the step that needs it",
    "groups_now_passed": "of two KV cache groups, a load fails of blocks that the window has passed",
    "groups_now_fail": "of two KV cache groups, a load fails, where such requests are to end",
    "groups_later": "of two KV cache groups, the full one's load beside the steps fails",
    "groups_later_window": "of two KV cache groups, the load beside the steps of the one with a window fails",
    "groups_later_fail": "of two KV cache groups, a load beside the steps fails, where such requests are to end",
}
NO_SUCH_LOAD = "it did not load again, no load failed"
"""What a preempted request comes to, whose blocks are still in the prefix cache when it is let in again."""


def cases() -> dict[str, str | None]:
    """Each failed load on each scheduler: who gets a wrong token or an error, or what it ends."""
    return dict(_findings(driver.found()))


def _findings(found: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    by_default = KVTransferConfig().kv_load_failure_policy  # nobody sets it here; an operator's choice is followed
    for scheduler, played in found.items():
        for name, case in played.items():
            outcome, ends = case["outcome"], sorted(case["ends"])
            if name == "now_resumed" and outcome == NO_SUCH_LOAD:
                continue
            if "no load failed" in outcome:
                raise NotBuilt(f"{scheduler}: no load fails where {SENTENCES[name]}")
            asked = name == "asked_fail" or (by_default != "fail" and "to end" in SENTENCES[name])
            if outcome == "right" and ends and by_default == "fail" and not asked:
                outcome = f"{' and '.join(ends)} ended with an error"
            if outcome == "right" and not ends and asked:
                outcome = "nobody ended with an error, which an operator had asked for"
            yield f"{scheduler}: {SENTENCES[name]}", None if outcome == "right" else outcome
