"""LMCache's worker adapter: when it reports requests with several stores, and requests whose id was used before."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import lmcache_finished_ids as driver

REPORTS = {
    "used_again": ("an id is used again", ["S", "S", "", "S", ""]),
    "used_again_with_stores": ("an id is used again, and each request has a store", ["", "S", "", "", "S", ""]),
    "one": ("a request has one store", ["", "S", ""]),
    "first_then_second": ("a request has two stores, and the first one ends first", ["", "", "S", ""]),
    "second_then_first": ("a request has two stores, and the second one ends first", ["", "", "S", ""]),
    "three": ("a request has three stores, and the second one ends last", ["", "", "", "S", ""]),
    "store_after_another": ("a request's second store begins when the first one has ended", ["", "", "S", ""]),
    "raises": ("a request has two stores, and the first one ends with an error", ["S", ""]),
    "long_prompt": ("a request has thousands of stores under way", ["", "", "S", ""]),
    "server_gone": ("the server is gone while two stores are under way", ["", "S"]),
}
"""By the driver's case: what it is, and the steps in which the request is to be reported as sent (S)."""
ASKED = 5
"""How often a store may be asked whether it has ended, each step, on average of a long prompt."""


def cases() -> dict[str, str | None]:
    """Each case: what is reported too early, twice or never, or kept for ever."""
    played = driver.played()
    if not hasattr(driver.MODULE, "HeartbeatThread"):
        del played["server_gone"]  # nobody looks whether the server is there
    found = {what: _of_reports(played[name], due) for name, (what, due) in REPORTS.items() if name in played}
    others = {
        "two stores, of which the first one fails": _of_failure,
        "ids that are kept once their requests were reported": _of_ids,
        "the device's events of two stores that are under way": _of_events,
        "how often a store of a long prompt is asked whether it has ended": _of_questions,
    }
    names = ("one_fails", "remembered", "events", "asked_for_a_long_prompt")
    for (what, judged), name in zip(others.items(), names, strict=True):
        came = played[name]
        found[what] = came if isinstance(came, str) else judged(came)
    return found


def _of_reports(came: Any, due: list[str]) -> str | None:
    if isinstance(came, str):
        return came
    for step, (reported, expected) in enumerate(zip(came, due, strict=True)):
        if reported == expected:
            continue
        if expected:
            return f"the request is not reported as sent in step {step}, when its last store has ended"
        again = came[:step].count("S") >= due.count("S")
        return (
            f"the request is reported as sent {'again' if again else 'before its last store has ended'}, in step {step}"
        )
    return None


def _of_failure(came: Any) -> str | None:
    wrong = _of_reports(came[:-1], ["S", ""])
    return wrong or (None if came[-1] else "the store that failed is not logged")


def _of_ids(came: Any) -> str | None:
    return f"{came} ids of {driver.REQUESTS} requests are kept" if came else None


def _of_events(came: Any) -> str | None:
    gone = [
        f"the {which} store's event is gone" for which, kept in zip(("first", "second"), came, strict=True) if not kept
    ]
    return ", ".join(gone) or None


def _of_questions(came: Any) -> str | None:
    return f"{came} times" if came > ASKED else None
