"""Real MoRI-IO engines, schedulers included: what clients of a decode engine get after preemptions and odd parameters.

`mori` is the device's library: where it is not installed, a stand-in has its place, which moves the bytes. The model is
a double, which says whether every slot that it reads holds what the request's tokens say.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moriio_preemption as driver

RIGHT: tuple[Any, ...] = ("right", "right, right")
KEPT_TO_BE_READ = {"alone": "right; blocks are kept"}
"""What a prefill engine may do that is read from: some releases need no more to keep a prompt's KV for its reader."""
SENTENCES = {
    "odd": "requests with odd parameters, or an id that no router made, get what their prompts say",
    "at_prefill": "a prefill engine computes prompts whose parameters are odd, or another's, and keeps no block",
}


def cases() -> dict[str, Callable[[], str | None]]:
    """Each case with both schedulers, where decode reads and where prefill writes."""
    driver.begin()
    model = driver.engine.make_model_config(Path(tempfile.mkdtemp()))
    return {
        f"{scheduler}, {mode}: {sentence(name)}": judged(name, mode, case)
        for scheduler, mode in itertools.product(driver.engine.SCHEDULERS, ("read", "write"))
        for name, case in driver.played(model, scheduler, mode).items()
    }


def sentence(name: str) -> str:
    doc = driver.CASES[name].__doc__ or ""
    return SENTENCES.get(name) or doc.strip().splitlines()[0].rstrip(".")


def judged(name: str, mode: str, case: Callable[[], Any]) -> Callable[[], str | None]:
    def wrong() -> str | None:
        outcome = case()
        if not isinstance(outcome, dict):
            return None if outcome in RIGHT else str(outcome)
        allowed = KEPT_TO_BE_READ if (name, mode) == ("at_prefill", "read") else {}
        found = {what: how for what, how in outcome.items() if allowed.get(what) != how}
        some = "; ".join(f"{what}: {how}" for what, how in list(found.items())[:3])
        return f"{len(found)} do not: {some}" if found else None

    return wrong
