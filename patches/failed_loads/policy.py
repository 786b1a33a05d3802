"""Whether somebody has set `kv_load_failure_policy`, which the configuration itself does not tell from its default.

It is seen where the configuration is made, in its `__post_init__`: of the two ways to make one, the constructor and the
reading of the command line's JSON, each has what was given among its variables. A default becomes a string object of
its own, which the configuration holds twice. Whoever assigns another one later has set the policy, too. Pickle keeps
that the two are one, so that the engine core sees the same.
"""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

POLICY = "kv_load_failure_policy"

DEFAULT = "_livepatch_default_policy"
"""Attribute of a KVTransferConfig: its policy's object, where nobody has set it; None where somebody has."""

FRAMES = 24
"""How many callers are looked at: pydantic and this runtime have a few in between."""


def note(config: Any) -> None:
    """Note of a configuration that is being made whether it is given a policy."""
    given = _given()
    own = None
    if given is not None and POLICY not in given:
        own = vars(config)[POLICY] = "".join([*vars(config)[POLICY]])  # equal to the default, and not the same object
    if given is not None:
        vars(config)[DEFAULT] = own


def _given() -> Any:
    """What the configuration is made of; None where that cannot be told."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(FRAMES):
        if frame is None:
            return None
        if "__dataclass_self__" in frame.f_locals:  # pydantic's constructor
            return frame.f_locals.get("kwargs", {})
        if frame.f_code.co_name == "parse_dataclass":  # vLLM's, of what the command line has
            return json.loads(frame.f_locals["val"])
        frame = frame.f_back
    return None


def is_set(scheduler: Any) -> bool:
    """Whether somebody has set the policy that a scheduler follows; False where that cannot be told."""
    known = getattr(getattr(getattr(scheduler, "vllm_config", None), "kv_transfer_config", None), "__dict__", {})
    return DEFAULT in known and known[DEFAULT] is not known[POLICY]
