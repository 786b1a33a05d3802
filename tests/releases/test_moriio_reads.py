# mypy: disable-error-code="import-not-found"
"""The real scheduler, MoRI-IO connector and worker of a decode engine that reads, stock and patched, each release.

Each test is one process. What is asked is what requests were computed on, so a case's outcome is what clients got.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from vllm_livepatch.tools.releases import registry

PATCH = "moriio-timeouts"
RELEASES = [pin.version for pin in registry.pins("vllm")]
SOME = executed.chosen(["0.14.1", "0.22.1"], RELEASES[: RELEASES.index("0.22.1") + 1])

SECONDS = {"HANDSHAKE": "0.5", "TRANSFER": "0.3", "DEFER": "0.3"}
OPTIONS = {f"LIVEPATCH_MORIIO_TIMEOUTS_{name}_SECONDS": seconds for name, seconds in SECONDS.items()}
ALONE = dict.fromkeys(
    ("LIVEPATCH_STALE_FINISHED_RECVING", "LIVEPATCH_KV_BLOCK_REAPER", "LIVEPATCH_FAILED_LOADS"), "off"
)
"""What the patch claims it does without the others."""
STOCK_SECONDS = "1"
"""How long a stock step may spin for a peer that is silent; nothing else takes a tenth of that."""
PATCHED_SECONDS = "30"

WAYS = [f"{scheduler}, {policy}" for scheduler in ("Scheduler", "AsyncScheduler") for policy in ("fail", "recompute")]

# Two requests ask a new peer in one step, and which of them a stock worker then loses is chance: see
# test_moriio_timeouts.
BY_CHANCE = "aborted_before"
# What each other case of driver/moriio_reads.py comes to on stock, whichever the scheduler and the policy.
STOCK = {
    "healthy": "right",
    "late": "wrong",
    "earlier_layer_late": "wrong; peer told too early",
    "fails": "wrong, next right",
    "fails_while_pending": "wrong, next wrong; ended early",
    "refused": "engine dies",
    "garbage": "engine dies",
    "silent": "never returns",
    "aborted": "wrong",
    "never_ends": "wrong, next right",
    "shares_a_block": "right, next wrong",
    "preempted": "wrong",
    "local": "wrong",
    "stopped": "KV of another request sent",
}
# There, a read's end is reported of a request that is running, on which the scheduler asserts.
REPORTED = dict.fromkeys(STOCK, "engine dies") | {name: STOCK[name] for name in ("silent", "local", "stopped")}
REPORTING = ("0.16.0", "0.17.0", "0.17.1")

SERVED = dict.fromkeys([*STOCK, BY_CHANCE], "right") | {"never_ends": "waits, next right; 3 kept"}
FAILED = ("fails", "fails_while_pending", "refused", "garbage", "silent")
PATCHED = {
    "fail": SERVED | dict.fromkeys(FAILED, "error, next right") | {"shares_a_block": "right, next error"},
    "recompute": SERVED | dict.fromkeys([*FAILED, "shares_a_block"], "right, next right"),
}
COUNTERS = {"read_failed": 16, "handshake_failed": 4, "handshake_timeout": 4, "read_overdue": 4}


def drive(
    warm: interpreter.Interpreter,
    release: str,
    work: Path,
    bundle: Path | None,
    environ: dict[str, str],
    *arguments: str,
) -> dict[str, Any]:
    """What driver/moriio_reads.py printed of a release."""
    cases: dict[str, Any] = warm.run(
        "moriio_reads",
        {"vllm": release},
        work,
        bundle=bundle,
        environ=environ,
        arguments=arguments,
        path=[interpreter.STANDINS],
    )["cases"]
    return cases


@pytest.mark.parametrize("release", SOME)
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The request runs in the step that begins its read: wrong tokens, unless the read is faster than the model."""
    expected = REPORTED if release in REPORTING else STOCK
    outcomes = drive(warm, release, tmp_path, None, {}, STOCK_SECONDS)
    assert all(found.pop(BY_CHANCE) for found in outcomes.values())
    assert outcomes == dict.fromkeys(WAYS, expected)


@pytest.mark.parametrize("release", SOME)
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Every request is computed on its own KV, or ends with an error; nothing is kept but what may still be written."""
    outcomes = drive(warm, release, tmp_path, bundle, OPTIONS | ALONE, PATCHED_SECONDS)
    assert outcomes == {way: PATCHED[way.rpartition(" ")[2]] for way in WAYS}
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    assert {name: patch["counters"].get(name) for name in COUNTERS} == COUNTERS


@pytest.mark.parametrize("release", executed.chosen(["0.22.1"], ["0.14.1", "0.16.0", "0.22.1"]))
def test_with_all_patches(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """The same next to the patches that drop stale completions, free what is held too long, and mend failed loads:
    these obey the policy that the driver sets."""
    outcomes = drive(warm, release, tmp_path, bundle, OPTIONS, PATCHED_SECONDS)
    assert outcomes == {way: PATCHED[way.rpartition(" ")[2]] for way in WAYS}


@pytest.mark.parametrize("release", ["0.14.1", "0.22.1"])
def test_own_error(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Where the patch itself errs, reads that were begun are still reported, and no request runs on what is not there."""
    outcomes = drive(warm, release, tmp_path, bundle, OPTIONS | ALONE, PATCHED_SECONDS, "own_error")
    assert outcomes == {WAYS[0]: {"own_error": "right"}}
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["reason"]) == ("failed", "raised"), patch
