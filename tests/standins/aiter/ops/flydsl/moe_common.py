"""How AITER's experts find gate and up in their first weight."""

from __future__ import annotations

import enum


class GateMode(enum.Enum):
    SEPARATED = "separated"
    INTERLEAVE = "interleave"
