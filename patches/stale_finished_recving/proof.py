"""Real schedulers of both kinds, told of transfers that nobody waits for any more, twice, too late or by two sides.

And the real MultiConnector, of whose children one has sent before the worker knows how many send.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import early_sends
import stale_finished_recving as driver


def cases() -> dict[str, str | None]:
    """Each notification on each scheduler: the request or the engine that it spoils, if it does."""
    sentences = {case.__name__: (case.__doc__ or "").strip().splitlines()[0] for case in driver.CASES}
    found = {}
    for scheduler, played in driver.played().items():
        for name, case in played.items():
            wrong = None if case["outcome"] == "survives" else case["outcome"]
            missed = None if case["connector_saw_all"] else "the connector was not told of everything"
            found[f"{scheduler}: {sentences[name]}"] = wrong or missed
    played = {name: case() for name, case in early_sends.CASES.items()}
    return found | {f"MultiConnector: {name.replace('_', ' ')}": early(case) for name, case in played.items()}


def early(case: dict[str, Any]) -> str | None:
    """What is wrong with what a MultiConnector has passed on: a request's blocks are freed where it says that it was
    sent."""
    sent = [step for step, passed_on in enumerate(case["reports"]) if "S" in passed_on]
    if sent != [case["last"]]:
        return f"the send has ended for all in step {case['last']}, and is reported in {sent}"
    return f"counts are left: {case['left']}" if case["left"] else None
