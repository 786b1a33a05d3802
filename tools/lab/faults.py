"""What is done to a running topology: to which part, when, and for how long."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab.supervisor import Supervisor

DISCONNECTS = "disconnects"
LOST_PREFILLS = "lost-prefills"
"""A fault that would leave no right answers to compare with: it begins with the load."""
PATCHES = Path(__file__).with_name("fault_patches")
INJECTED = {
    "late-reads": "SECONDS",
    "late-requests": "SECONDS",
    "link": "MB",
    "lost-completions": "SHARE",
    LOST_PREFILLS: "SHARE",
    "slow-lmcache": "SECONDS",
    "slow-offload": "SECONDS",
    "slow-store": "SECONDS",
    "slow-transfer": "SECONDS",
}
"""Faults inside the parts, patches that ride in with every setup's bundle; and which option the number after `=` is."""
_FORM = re.compile(r"(?P<kind>kill|stop)-(?P<part>[a-z]+)(?:@(?P<at>\d+(?:\.\d+)?))?(?:\+(?P<lasts>\d+(?:\.\d+)?))?")
_USUAL_MOMENT = 5.0
_USUAL_STOP = 10.0


@dataclass(frozen=True)
class Fault:
    """A part is killed (SIGKILL) or stopped (SIGSTOP); seconds since the load began, and until it is back."""

    kind: str
    part: str
    at: float
    lasts: float | None
    """None: it does not come back."""


def parse(texts: Collection[str], parts: Collection[str]) -> tuple[bool, list[Fault]]:
    """Whether clients hang up, and what is done to which of the ``parts``. Raises UserError for anything else.

    A fault is `disconnects`, `kill-PART[@SECONDS][+SECONDS]` or `stop-PART[@SECONDS][+SECONDS]`: after so many seconds
    of load, for so long. What is killed stays dead unless a time is given; what is stopped goes on after 10 s.
    """
    faults = []
    for text in texts:
        if text == DISCONNECTS or text.partition("=")[0] in INJECTED:
            continue
        found = _FORM.fullmatch(text)
        if found is None or found["part"] not in parts:
            known = ", ".join(
                [DISCONNECTS, *INJECTED, *(f"{kind}-{part}" for part in parts for kind in ("kill", "stop"))]
            )
            raise UserError(
                f"{text!r} is no fault of this topology: there are {known}, the last with @SECONDS and +SECONDS"
            )
        lasts = float(found["lasts"]) if found["lasts"] else _USUAL_STOP if found["kind"] == "stop" else None
        faults.append(Fault(found["kind"], found["part"], float(found["at"] or _USUAL_MOMENT), lasts))
    return DISCONNECTS in texts, faults


def injected(texts: Collection[str]) -> dict[str, dict[str, str]]:
    """The faults inside the parts: of each its patch's name and the variables that turn it on.

    They act from the part's start to its end. Raises UserError.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name in INJECTED:
            if equals and not re.fullmatch(r"\d+(\.\d+)?", value):
                raise UserError(f"--fault {text}: write {name}={INJECTED[name]}, a number")
            found[name] = {variable(name): "on"} | ({f"{variable(name)}_{INJECTED[name]}": value} if equals else {})
    return found


async def play(fault: Fault, parts: Supervisor) -> bool:
    """Wait for the fault's moment, do it, and undo it when its time is over. Raises ``PartFailed``.

    Returns whether the part is back by it.
    """
    await asyncio.sleep(fault.at)
    if fault.kind == "kill":
        parts.kill(fault.part)
    else:
        parts.pause(fault.part)
    if fault.lasts is None:
        return False
    await asyncio.sleep(fault.lasts)
    if fault.kind == "kill":
        await parts.restart(fault.part)
        return True
    return parts.resume(fault.part)
