"""What must be so where a patch's target is imported: `[when]` in its patch.toml. Pure, as the decision is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROCM = "rocm"
"""The one platform that is no system: torch is built for it."""


@dataclass(frozen=True)
class When:
    """`environ`: variables, and the texts that they must have; the empty one is a variable that is not set."""

    environ: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""  # as sys.platform has it, or ROCM; empty: any

    def unmet(self, variables: Mapping[str, str], platform: str, rocm: bool) -> str:
        """The first condition that is not so, in words without a value, which may be a secret; empty where all are."""
        if self.platform and not (rocm if self.platform == ROCM else self.platform == platform):
            return f"the platform is not {self.platform}"
        for name, text in self.environ.items():
            if variables.get(name, "") != text:
                return f"{name} is not {text!r}" if text else f"{name} is set"
        return ""
