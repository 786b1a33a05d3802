"""What of played cases went wrong, for proofs: each case has a judge, whose docstring says what is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Judged = tuple[Any, str]
"""What has to be so, and what went wrong where it is not."""
Judge = Callable[..., list[Judged]]
"""Takes what its case came to, which has the judge's name."""


def finding(judge: Judge, came: Any) -> str | None:
    """What went wrong in a case, None where nothing did; what it raised, where it has raised."""
    if isinstance(came, str) and came.startswith("raises: "):
        return came
    looked_at = judge(*(came if isinstance(came, (list, tuple)) else [came]))
    return next((wrong for so, wrong in looked_at if not so), None)


def findings(judges: Iterable[Judge], played: Mapping[str, Any]) -> dict[str, str | None]:
    """What went wrong in each case that was played, by its judge's sentence."""
    return {
        (judge.__doc__ or "").strip(): finding(judge, played[judge.__name__])
        for judge in judges
        if judge.__name__ in played
    }
