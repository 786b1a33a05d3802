"""The real OffloadingConnector, schedulers of both kinds: blocks given anew amid a copy, requests that end early.

Blocks on the device and on the host have contents, and the model samples a wrong token on any but a request's own.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import offloading_fresh as driver

SENTENCES = {
    "computed": "others compute into blocks whose copy to the host is under way",
    "pulled": "another connector loads into blocks whose copy to the host is under way",
    "pulled_workers": "another connector loads into blocks whose copies to the host are under way on two workers",
    "pulled_hybrid": "another connector loads into blocks of two groups whose copy to the host is under way",
    "queued": "the client of a request that waits for blocks hangs up",
    "queued_hybrid": "the client of a request that waits for blocks of two groups hangs up",
    "hung_up": "a client hangs up amid its prompt, whose last block is not full",
    "hung_up_longer": "a client hangs up amid a longer prompt, whose last block is not full",
    "hung_up_hybrid": "a client hangs up amid its prompt, whose last blocks of two groups are not full",
    "hung_up_while_pulled": "a client hangs up while another connector loads its prompt",
    "last_token": "a request's last token, which nobody computes, is the last of a block",
    "reset": "the prefix cache is reset while requests run whose prompts are stored",
    "reset_while_stored": "the prefix cache is reset while a running request is copied to the host",
    "reset_while_stored_beside": "the prefix cache is reset amid a copy to the host, with another connector beside",
}


def cases() -> dict[str, str | None]:
    """Each of these on each scheduler: who gets a wrong token or none, or how the engine ends."""
    return {
        f"{scheduler}: {SENTENCES[name]}": None if outcome == "right" else outcome
        for scheduler, found in driver.found(SENTENCES).items()
        for name, outcome in found.items()
    }
