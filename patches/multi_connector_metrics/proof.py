"""A release's metrics and log, told of failed transfers by two children of a MultiConnector."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import multi_connector_metrics as driver


def cases() -> dict[str, str | None]:
    """Whether what the children tell is shown, and ends nothing."""
    found = driver.found()
    both = found["after"] - found["before"]
    findings = {
        "NIXL's connector alone tells of a failed transfer": None
        if found["before"] == 1
        else f"the metrics show {found['before']:g} failed transfers",
        "NIXL's and Mooncake's connectors tell of one each": found["raised"]
        or (None if both == 1 else f"the metrics show {both:g} of NIXL's failed transfers"),
    }
    if len(found["tell"]) == len(driver.CHILDREN):
        logged = None if found["logged"] else "the log lacks a child's figures"
        findings["what both tell is in the log"] = logged
    return findings
