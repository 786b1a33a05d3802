"""vLLM's real Mooncake connectors and Mooncake's real engine, on CPU memory: asks that come to nothing, late or twice.

Prefill is looked at: what it answers, what it writes, and which blocks it lets go. A decode engine that is told of no
load that failed counts as told where prefill's answer names the request.
"""

# mypy: disable-error-code="import-not-found,misc"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mooncake.engine  # noqa: F401  (vLLM imports it, and goes on without it)
import mooncake_asks as driver
from judging import Judge, Judged, findings

driver.PATIENCE = 5.0
FAILED, NOTHING, OWN, REFUSED = "failed", "nothing is told", "its own", "refused"
STUCK = "decode waits, and hears nothing of its prefill"


DECODES: list[Any] = []
"""The decode engines that were played."""
FAILURES: set[str] = set()
"""Requests of which decode's worker has noted that their load failed."""


class Answers:
    """In the place of decode's decoder of answers: of which requests prefill has said that they failed."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.refused: set[str] = set()
        self.errors = 0

    def decode(self, data: Any) -> Any:
        answer = self._own.decode(data)
        self.refused.update(answer.err_reqs or ())
        self.errors += answer.status.name == "ERROR"
        return answer


def noted(failing: Callable[..., Any], pull_metas: Any, names: Any, *rest: Any, **named: Any) -> Any:
    """Note the requests of which decode's worker says that their load failed, and let it say so."""
    FAILURES.update(names)
    return failing(pull_metas, names, *rest, **named)


class Pair(driver.Pair):
    """A prefill engine and a decode engine, whose answers are looked at."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        super().__init__(prefill, decode)
        self._errors: dict[str, int] = {}
        DECODES.append(decode)
        failing = getattr(decode.worker, "_handle_failed_recv", None)
        if failing is not None:
            decode.worker._handle_failed_recv = partial(noted, failing)
        decode.worker._xfer_resp_decoder = self._answers = Answers(decode.worker._xfer_resp_decoder)

    def ask(self, name: str, blocks: list[int], of: Any = None) -> Any:
        self._errors[name] = self._answers.errors
        return super().ask(name, blocks, of)

    def loaded(self, name: str, blocks: list[int], patience: float | None = None) -> str:
        outcome: str = super().loaded(name, blocks, patience)
        told = f"d-{name}" in self._answers.refused or self._answers.errors > self._errors.get(name, 0)
        return REFUSED if outcome == NOTHING and told else outcome


def loads(*outcomes: str) -> list[Judged]:
    """Decode loads what prefill has computed."""
    return [
        (outcome == OWN, STUCK if outcome == NOTHING else f"decode's load comes to: {outcome}") for outcome in outcomes
    ]


def told(outcome: str) -> Judged:
    return outcome in (FAILED, REFUSED), STUCK if outcome == NOTHING else f"decode's load comes to: {outcome}"


def comes_back(let_go: bool) -> Judged:
    return let_go, "prefill does not let go of its blocks"


def in_turn(outcome: str, let_go: bool) -> list[Judged]:
    """Decode asks when its prefill has ended"""
    return [*loads(outcome), comes_back(let_go)]


def at_once(outcome: str, let_go: bool) -> list[Judged]:
    """Decode asks before its prefill has begun"""
    return [*loads(outcome), comes_back(let_go)]


def stopped(outcome: str) -> list[Judged]:
    """Decode waits for a prefill that ends by a stop token"""
    return [told(outcome)]


def aborted(outcome: str) -> list[Judged]:
    """Decode asks for a prefill that was aborted"""
    return [told(outcome)]


def aborted_in_queue(outcome: str) -> list[Judged]:
    """Decode waits for a prefill that is aborted beside others that had not begun"""
    return [told(outcome)]


def begun_again(outcome: str, let_go: bool) -> list[Judged]:
    """A prefill was aborted, and comes again before decode asks"""
    return [*loads(outcome), comes_back(let_go)]


def begun_again_at_once(outcome: str, beside: str) -> list[Judged]:
    """A prefill for which decode waits is aborted and comes again, and another ends in that step"""
    return loads(outcome, beside)


def no_leg(outcome: str, left: bool) -> list[Judged]:
    """Decode asks for a prefill that never comes, and its time is over"""
    return [told(outcome)]


def tried_again_unheard(outcome: str, let_go: bool) -> list[Judged]:
    """A client has hung up before prefill heard of it, and tries again by the same transfer: decode asks first"""
    return [*loads(outcome), comes_back(let_go)]


def tried_again_apart(outcome: str, let_go: bool) -> list[Judged]:
    """A client has hung up amid its prefill, and tries again by the same transfer: decode asks first"""
    return [*loads(outcome), comes_back(let_go)]


def tried_again_at_once(outcome: str, let_go: bool) -> list[Judged]:
    """A client has hung up amid its prefill, and the new one begins in the step in which that one is given up"""
    return [*loads(outcome), comes_back(let_go)]


def tried_again_twice(outcome: str, let_go: bool, early: bool, again: str, let_go_again: bool) -> list[Judged]:
    """A client tries again amid its prefill, loads what that computed, and comes by the same transfer once more"""
    gone = (not early, "prefill lets go of blocks that nobody has loaded")
    return [*loads(outcome, again), comes_back(let_go), gone, comes_back(let_go_again)]


def let_go_named(named: bool, taken: bool, let_go: bool) -> list[Judged]:
    """Decode lets go of a transfer, and prefill's answer names it unless decode takes that for the end of a load"""
    return [
        (named or taken, "the answer leaves out what decode let go of"),
        (not (named and taken), "decode takes it for the end of a load"),
        comes_back(let_go),
    ]


def let_go_first(outcome: str, let_go: bool) -> list[Judged]:
    """A client has hung up, and decode asks after it has let go of the transfer"""
    return [told(outcome), comes_back(let_go)]


def tried_again(outcome: str, let_go: bool) -> list[Judged]:
    """A client has hung up before either leg was admitted, and tries again by the same transfer"""
    return [*loads(outcome), comes_back(let_go)]


def tried_again_first(outcome: str, let_go: bool) -> list[Judged]:
    """A client has hung up when prefill had ended, and tries again by the same transfer: decode asks first"""
    return [*loads(outcome), comes_back(let_go)]


def let_go_before(outcome: str, let_go: bool, untouched: bool) -> list[Judged]:
    """A client has hung up, decode asks for its prefill all the same, and the prefill begins after that"""
    return [told(outcome), comes_back(let_go), not_written(untouched)]


def let_go_last(outcome: str, let_go: bool = True, untouched: bool = True) -> list[Judged]:
    """Decode waits, lets go of the transfer, and the prefill comes after that"""
    return [told(outcome), comes_back(let_go), not_written(untouched)]


def not_written(untouched: bool) -> Judged:
    return untouched, "prefill writes into blocks that decode has given to others"


def let_go_amid(freed: bool, outcome: str, let_go: bool) -> list[Judged]:
    """Decode lets go of a transfer while its blocks are written"""
    return [(not freed, "prefill's blocks are given away while they are read"), *loads(outcome), comes_back(let_go)]


def registering(first: str, second: str) -> list[Judged]:
    """Decode asks a prefill engine of two workers, of which one has registered, and then both"""
    wrong = "decode has a part of the heads from one of two workers, and takes it for all"
    return [(not outcome.startswith("wrong"), wrong) for outcome in (first, second)]


def waiting(served: str, others: list[str]) -> list[Judged]:
    """A prefill has ended, and as many others are waited for as prefill has tasks"""
    return loads(served, *others)


def slots(served: str, answered: bool, let_go: bool, behind: str) -> list[Judged]:
    """As many clients have hung up before their prefills began as prefill has tasks"""
    return [
        *loads(served),
        (answered, "prefill does not answer to those that let go"),
        comes_back(let_go),
        *loads(behind),
    ]


def stray(answered: bool, outcome: str) -> list[Judged]:
    """A message that is no ask comes to prefill's port, and decode asks after it"""
    return loads(outcome)


def odd_id(outcome: str) -> list[Judged]:
    """A client names its transfer by a list, and decode asks for another prefill, which ended in that step"""
    return loads(outcome)


def two_legs(outcome: str, let_go: bool, other_let_go: bool) -> list[Judged]:
    """Two prefills of one transfer end, and decode asks for the first"""
    return [*loads(outcome), comes_back(let_go), comes_back(other_let_go)]


def two_legs_in_turn(outcome: str, let_go: bool, beside: str) -> list[Judged]:
    """Of two prefills of one transfer the second ends when the first was sent, in one step with another's"""
    return [*loads(outcome), comes_back(let_go), *loads(beside)]


def two_legs_one_aborted(outcome: str, let_go: bool) -> list[Judged]:
    """Of two prefills of one transfer the first has ended, and the second is aborted"""
    return [*loads(outcome), comes_back(let_go)]


def let_go_beside(beside: str, outcome: str, let_go: bool) -> list[Judged]:
    """A client hangs up when the prefill of another load of the same message ends, and its own begins after that"""
    return [*loads(beside), (True, "") if outcome == OWN else told(outcome), comes_back(let_go)]


EVERY: tuple[Judge, ...] = (
    in_turn,
    at_once,
    stopped,
    aborted,
    aborted_in_queue,
    begun_again,
    begun_again_at_once,
    no_leg,
    tried_again,
    tried_again_first,
    tried_again_unheard,
    tried_again_apart,
    tried_again_at_once,
    tried_again_twice,
    let_go_named,
    let_go_first,
    let_go_before,
    let_go_last,
    let_go_amid,
    let_go_beside,
    registering,
    waiting,
    slots,
    stray,
    odd_id,
    two_legs,
    two_legs_in_turn,
    two_legs_one_aborted,
)


def cases() -> dict[str, str | None]:
    """Each case, by its sentence."""
    played = driver.played([judge.__name__ for judge in EVERY], Pair)
    found: dict[str, str | None] = findings(EVERY, played)
    told = {*FAILURES}.union(*(decode.received for decode in DECODES))
    over = sorted(name for name in told if name.endswith("-over"))
    sentence = "Decode lets go of transfers, and no load counts as ended or failed for that"
    return {**found, sentence: f"these count: {', '.join(over)}" if over else None}
