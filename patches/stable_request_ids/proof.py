"""A release's front ends and engine core, which requests of one id reach: at once, one after another, and too soon."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import real_scheduler as real
import request_ids
import reused_ids

REFUSED = ("refused: ", "fails")
"""How a request ends that is told that its id is taken."""


def cases() -> dict[str, str | None]:
    """What prefill and decode make of one id, and what becomes of the requests that share it."""
    real.quiet()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        return dict(_findings(request_ids.play(model_config), reused_ids.play(model_config)))


def _findings(ids: dict[str, Any], reused: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    yield "prefill and decode see the same request id", _unless_kept(ids["named"])
    yield "so they do with the release's own switch", _unless_kept(ids["named_with_switch"])
    for case in request_ids.CASES:
        if ids[case.__name__] != {"first": "no such thing"}:
            yield _sentence(case), _shared(ids[case.__name__], refusable="second" in case.__name__)
    for again in reused_ids.CASES:
        yield _sentence(again), _used_again(reused[again.__name__])


def _sentence(case: Callable[..., Any]) -> str:
    said = " ".join((case.__doc__ or "").split()).rstrip(".")
    return said.replace("The same", "A client hangs up and tries again amid a step")


def _unless_kept(named: str) -> str | None:
    return None if named == "kept" else f"the id became {named}"


def _shared(found: Mapping[str, str], refusable: bool) -> str | None:
    """All are answered; the second, where its id is live, may instead be told that it cannot be."""

    def is_right(name: str, what: str) -> bool:
        return what == "answered" or (refusable and name == "second" and what.startswith(REFUSED))

    return _wrong(found, is_right)


def _used_again(found: Mapping[str, str]) -> str | None:
    """Whoever came last stayed, and is answered; the others, who went, got nothing that is not theirs."""
    *_, last = found
    return _wrong(found, lambda name, what: what == "answered" or (name != last and what in ("abort", "stop")))


def _wrong(found: Mapping[str, str], is_right: Callable[[str, str], bool]) -> str | None:
    if "engine" in found:
        return f"the engine ends: {found['engine']}"
    return ", ".join(f"{name}: {what}" for name, what in found.items() if not is_right(name, what)) or None
