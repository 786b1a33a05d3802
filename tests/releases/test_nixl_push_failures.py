"""Every pinned vLLM with a push worker: real workers and real NIXL agents, and writes that fail or do not come.

On stock decode hears nothing, the prefill engine ends on some releases, and what is pushed after its lease is another
request's. Patched, a load that NIXL was never given is a failed one, with its blocks; a write that may still come holds
its blocks, as on stock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from prefill_decode_drive import nixl_site
from vllm_livepatch.tools.releases import registry

DRIVER = "push_failures"
PATCH = "nixl-push-failures"
KILLED = ("0.24.0", "0.30.0")
"""Releases on which a prefill process is killed too: nothing of that is a release's own."""
RELEASES = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.24")]

WELL = {"heard": "received", "contents": ["its own"], "invalid": False}
ANOTHERS = {**WELL, "contents": ["another's"]}
NOTHING = {"heard": "nothing", "contents": ["none"]}
FAILED = {"heard": "failed", "contents": ["none"], "invalid": True}


def pushed(release: str) -> dict[str, Any]:
    """0.30.0 never reports a push as sent: prefill's blocks come back when the lease ends."""
    return {"first": WELL, "second": WELL, "sent": [] if release == "0.30.0" else ["first", "second"]}


def stock(release: str) -> dict[str, Any]:
    write: dict[str, Any] = {"meanwhile": "nothing", "blocks kept": False}
    if Version(release) < Version("0.30"):
        write["prefill"] = "AssertionError: write not found in recving_metadata list"
    else:
        write |= NOTHING
    return {
        "pushed": pushed(release),
        "prepare_fails": NOTHING,
        "post_fails": NOTHING,
        "write_fails": write,
        "late": NOTHING,
        "aborted": {"before": NOTHING, "after": NOTHING},
        "never": {**NOTHING, "given": False, "afterwards": ["its own"]},
        "without": {"well": WELL, "post_fails": NOTHING},
        "hybrid": NOTHING,
        "handshake_fails": NOTHING,
        "handshake_late": ANOTHERS,
        "ended": {"waits": NOTHING, "begun": NOTHING},
    } | ({"killed": {"stopped": "nothing", "lost": NOTHING, "later": NOTHING}} if release in KILLED else {})


def patched(release: str) -> dict[str, Any]:
    """From 0.30.0 a failed load of a model with several kinds of layers is named by its request alone.

    To 0.26.0 the writer itself shakes hands, so that the lease is held meanwhile.
    """
    version = Version(release)
    return {
        "pushed": pushed(release),
        "prepare_fails": FAILED,
        "post_fails": NOTHING,
        "write_fails": {"meanwhile": "nothing", "blocks kept": True, **NOTHING},
        "late": FAILED,
        "aborted": {"before": FAILED, "after": FAILED},
        "same_id": WELL,
        "never": {**FAILED, "given": True, "afterwards": ["another's"]},
        "without": {"well": WELL, "post_fails": NOTHING},
        "hybrid": {**FAILED, "invalid": version < Version("0.30")},
        "handshake_fails": FAILED,
        "handshake_late": WELL if version < Version("0.27") else FAILED,
        "ended": {"waits": FAILED, "begun": NOTHING},
    } | ({"killed": {"stopped": "nothing", "lost": NOTHING, "later": NOTHING}} if release in KILLED else {})


def arguments(release: str, seconds: str) -> list[str]:
    return [seconds, *(["killed"] if release in KILLED else [])]


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, engine_python: Path, tmp_path: Path) -> None:
    """Whatever happens on prefill, decode waits; what comes after the lease is taken for the request's own."""
    run = warm.run(
        DRIVER, {"vllm": release}, tmp_path, path=[nixl_site(engine_python)], arguments=arguments(release, "0.3")
    )
    del run["cases"]["same_id"]  # which of two registrations of one id is served is a matter of luck
    assert run["cases"] == stock(release)


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(
    release: str, warm: interpreter.Interpreter, engine_python: Path, bundle: Path, tmp_path: Path
) -> None:
    """Every load that will not come is a failed one, of which nothing is written afterwards; a healthy one is as before."""
    run = warm.run(
        DRIVER,
        {"vllm": release},
        tmp_path,
        bundle=bundle,
        path=[nixl_site(engine_python)],
        arguments=arguments(release, "60"),
    )
    assert run["cases"] == patched(release)
    (report,) = (
        file
        for file in (tmp_path / "state").glob("*.json")
        if json.loads(file.read_text(encoding="utf-8"))["pid"] == run["pid"]
    )
    patch = interpreter.read(report, PATCH)
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    counters = patch["counters"]
    slow_hands = Version(release) >= Version("0.27")
    assert counters["rejected"] == counters["refused"] == counters["failed"] == (9 if slow_hands else 8)
    assert counters.get("late", 0) == slow_hands
    assert counters.get("write_failed", 0) == (1 if Version(release) < Version("0.30") else 0)
    assert counters["withdrawn"] >= 4  # those that wait for ever, and `never`
    assert "untold" not in counters
