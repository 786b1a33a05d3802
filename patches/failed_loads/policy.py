"""Whether somebody has set `kv_load_failure_policy`, which the configuration itself does not tell from its default.

It is seen where the configuration is made, in its `__post_init__`: of the two ways to make one, the constructor and
the reading of the command line's JSON, each has what was given among its variables. Where nobody gives a policy, the
default becomes the first of the configuration's attributes, as a string that is not interned. Copies and pickles keep
both, so that the engine core sees the same; nothing is added, so that whoever copies a configuration by its attributes
can. Whoever assigns a policy later, which a program's text has as an interned string, has set it, too.
"""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

POLICY = "kv_load_failure_policy"

FRAMES = 24
"""How many callers are looked at: pydantic and this runtime have a few in between."""


_made: dict[str, str] = {}
"""The string, not interned, that stands for each default in this process."""


def note(config: Any) -> None:
    """Note of a configuration that is being made whether it is given a policy; where that cannot be told, it is not."""
    attributes, given = vars(config), _given() or {}
    default = _made.setdefault(attributes[POLICY], "".join([*attributes[POLICY]]))
    if POLICY not in given or given[POLICY] is default:  # or a configuration that was not given one is copied
        object.__setattr__(config, "__dict__", {POLICY: default, **_without(attributes)})
    if "__getstate__" not in vars(type(config)):
        type(config).__getstate__ = _state  # from Python 3.11 on, object has one


def _without(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name != POLICY}


def _state(config: Any) -> dict[str, Any]:
    """What is pickled and copied: a policy that was assigned is not its first, since nothing is interned there."""
    attributes = vars(config)
    return {**_without(attributes), POLICY: attributes[POLICY]} if _is_set(attributes) else attributes


def _is_set(attributes: dict[str, Any]) -> bool:
    policy = attributes[POLICY]
    return next(iter(attributes)) != POLICY or policy is sys.intern("".join([*policy]))


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
    """Whether somebody has set the policy that a scheduler follows; False where there is none."""
    config = getattr(getattr(scheduler, "vllm_config", None), "kv_transfer_config", None)
    attributes: dict[str, Any] = getattr(config, "__dict__", {})
    return POLICY in attributes and _is_set(attributes)
