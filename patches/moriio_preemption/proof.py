"""Real MoRI-IO engines, schedulers included: what clients of a decode engine get after preemptions and odd parameters.

`mori` is the device's library: a stand-in has its place, which moves the bytes. The model is
a double, which says whether every slot that it reads holds what the request's tokens say.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import inspect
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import result

result.stand_in()

import moriio_preemption as driver  # noqa: E402
from mori import orders  # noqa: E402

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
    found = {
        f"{scheduler}, {mode}: {sentence(name)}": judged(name, mode, case)
        for scheduler, mode in itertools.product(driver.engine.SCHEDULERS, ("read", "write"))
        for name, case in driver.played(model, scheduler, mode).items()
    }
    for scheduler in driver.engine.SCHEDULERS:
        make = functools.partial(driver.Two, scheduler, model, False)
        found[f"{scheduler}, read: KV is kept for a reader of whom nothing is known, where the connector does so"] = (
            as_by_itself(scheduler, make, kept_for_anybody)
        )
        found[f"{scheduler}, read: KV of a transfer without an id is read, where the connector does so"] = as_by_itself(
            scheduler, make, read_without_id
        )
    return found


def sentence(name: str) -> str:
    doc = driver.CASES[name].__doc__ or ""
    return SENTENCES.get(name) or doc.strip().splitlines()[0].rstrip(".")


def judged(name: str, mode: str, case: Callable[[], Any]) -> Callable[[], str | None]:
    def wrong() -> str | None:
        outcome = case()
        if outcome == "right" and name == "healthy" and not orders.begun():
            return "the prompts were computed here, and their KV was not transferred"
        if not isinstance(outcome, dict):
            return None if outcome in RIGHT else str(outcome)
        allowed = KEPT_TO_BE_READ if (name, mode) == ("at_prefill", "read") else {}
        found = {what: how for what, how in outcome.items() if allowed.get(what) != how}
        some = "; ".join(f"{what}: {how}" for what, how in list(found.items())[:3])
        return f"{len(found)} do not: {some}" if found else None

    return wrong


def kept_for_anybody(two: Any) -> bool:
    """Whether a prefill engine keeps a prompt's blocks that is asked for no more than that."""
    one = two.make(prefill=True)
    return bool(driver.computes(one, {"do_remote_decode": True}) == "right; blocks are kept")


def read_without_id(two: Any) -> bool:
    """Whether a decode engine reads where the router sent everything but a transfer's id."""
    tokens, named = driver.prompt(11), two.named()
    whole = two.parameters(two.prefill, do_remote_prefill=True, remote_engine_id="p")
    whole["remote_block_ids"] = driver.blocks_named(3)
    del whole["transfer_id"]
    two.decode.submit(named, tokens, whole, 3)
    orders.let(orders.AT_ONCE)
    two.decode.run([named])
    return bool(orders.begun())


def as_by_itself(scheduler: str, make: Callable[[], Any], of_two: Callable[[Any], bool]) -> Callable[[], str | None]:
    """What is wrong unless an engine does what it does where no request is looked at before the scheduler has it."""

    def does_by_itself() -> bool:
        two = make()
        original = inspect.unwrap(driver.engine.SCHEDULERS[scheduler].add_request)
        for side in (two.prefill, two.decode):
            # Not in its class: the patch would report meanwhile that somebody has replaced it.
            side.scheduler.add_request = functools.partial(original, side.scheduler)
        return of_two(two)

    def wrong() -> str | None:
        if driver.attempt(lambda: of_two(make())) is True or driver.attempt(does_by_itself) is not True:
            return None
        return "the connector by itself does so, and here it is not done"

    return wrong
