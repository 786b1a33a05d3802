"""Real schedulers of both kinds, told of transfers that nobody waits for any more, twice, too late or by two sides."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

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
    return found
