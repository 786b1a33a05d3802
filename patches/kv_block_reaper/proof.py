"""What becomes of blocks kept for a transfer whose end nobody reports: MoRI-IO's, NIXL's, and any connector's.

Where the release's own connectors give such transfers up by themselves, its scheduler is not asked to.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kv_block_reaper as driver
import lost_sends
import real_scheduler as real

NO_TIMEOUT = 600.0
"""Seconds after which blocks come back of a connector that has no time-out of its own."""
EVERYWHERE = ("receive_pending",)
"""What stands whether or not a connector loses the end of sends."""


def cases() -> dict[str, str | None]:
    """Each of these: whose blocks are never given back, or too early."""
    real.quiet()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        findings, loses = dict(_of_leases()), lost_sends.nixl_worker() is not None and _strands()
        driver.take_clock()
        if lost_sends.has_moriio():
            loses = not _gives_up(model_config) or loses
            for scheduler in real.SCHEDULERS:
                sentence = f"{scheduler}: a decode engine that reads by MoRI-IO is never heard of again"
                findings[sentence] = _of_moriio(scheduler, model_config)
        return findings | dict(_of_any(model_config, loses))


def _of_leases() -> Iterator[tuple[str, str | None]]:
    """NIXL's worker, where decode engines can renew the leases on what they are to read."""
    if lost_sends.nixl_worker() is None:
        return
    yield "NIXL: a lease runs out behind one that is renewed", _behind_a_renewed_one(lost_sends.Leases())
    leases = lost_sends.Leases()
    leases.lease("dead", -1)
    yield "NIXL: a lease runs out", None if leases.step() == {"dead"} else "its blocks never come back"
    leases = lost_sends.Leases()
    for name in ("waits", "read"):
        leases.lease(name, 100)
    leases.read("read")
    sent = leases.step()
    yield "NIXL: a request is read before its lease runs out", None if sent == {"read"} else f"{sorted(sent)} come back"


def _behind_a_renewed_one(leases: Any) -> str | None:
    leases.lease("lives", 1)
    leases.lease("dead", -1)
    leases.renewed("lives")
    sent = leases.step() | leases.step()
    if "lives" in sent:
        return "the blocks of the renewed one come back"
    return None if sent == {"dead"} else "its blocks do not come back"


def _strands() -> bool:
    """Whether NIXL's worker, as the release has it, leaves leases that ran out where they are."""
    return _behind_a_renewed_one(lost_sends.Leases(unpatched=True)) is not None


def _gives_up(model_config: Any) -> bool:
    """Whether MoRI-IO's connector has a time-out of its own; no time passes for the patch."""
    prefill = lost_sends.MoRIIOPrefill("Scheduler", model_config)
    prefill.hold()
    prefill.now += 100 * NO_TIMEOUT
    prefill.steps(4)
    return not prefill.holds()


def _of_moriio(scheduler: str, model_config: Any) -> str | None:
    prefill = lost_sends.MoRIIOPrefill(scheduler, model_config)
    prefill.hold()
    prefill.now += 1
    driver.later(1)
    prefill.steps(3)
    if not prefill.holds():
        return "its blocks come back at once"
    prefill.now += NO_TIMEOUT
    driver.later(NO_TIMEOUT)
    prefill.steps(4)
    return "its blocks never come back" if prefill.holds() else None


def _of_any(model_config: Any, loses: bool) -> Iterator[tuple[str, str | None]]:
    driver.AGE = NO_TIMEOUT
    for scheduler, played in driver.played("MoRIIODouble", model_config).items():
        for case in driver.CASES:
            if loses or case.__name__ in EVERYWHERE:
                sentence = " ".join((case.__doc__ or "").split()).rstrip(".")
                yield f"{scheduler}: {sentence}", ", ".join(played[case.__name__]) or None
