"""LMCache's real in-process connector, both sides, with vLLM's real schedulers: loads within the step that fail.

Slots and stored chunks have contents (driver/lmcache_within_step.py). On stock what is computed on lost KV is stored in
LMCache, by each of several workers, and others load it. A run takes seconds of a core: CI runs the first and the last form, and one between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_within_step"
PATCH = "lmcache-unloaded-stores"
IN_CI = {"0.3.15": "0.17.1", "0.4.6": "0.20.2", "0.5.6": "0.33.0"}
"""Which vLLM is beside an LMCache."""
EVERY = [pin.version for pin in registry.pins("lmcache")]


def beside(lmcache: str) -> str:
    """A vLLM that the release can be imported with."""
    version = Version(lmcache)
    otherwise = "0.20.2" if version < Version("0.4.7") else "0.23.0" if version < Version("0.5.1") else "0.29.0"
    return IN_CI.get(lmcache, otherwise)


PAIRS = [(beside(release), release) for release in executed.chosen(list(IN_CI), EVERY)]
STOCKS = [(beside(release), release) for release in executed.chosen(["0.5.6"], EVERY)]
MODES = ("Scheduler", "AsyncScheduler")
ALONE = ("first_chunk", "second_chunk", "first_chunk_in_parts", "second_chunk_in_parts")
SHARED = ("shared", "shared_in_parts")
ABORTED = ("aborted", "aborted_in_parts")
ONE_OF_SEVERAL = ("of_two_workers", "of_two_stages", "of_the_last_stage")
SPECULATIVE = ("speculative", "speculative_of_two")
SEVERAL_IN_PARTS = ("of_two_workers_in_parts",)
ALL = (*ALONE, *ONE_OF_SEVERAL, *SPECULATIVE)
SILENT = ("one_is_silent",)

LATER = "third got a wrong token, fourth got a wrong token"
STORED = "chunk 2 is stored wrong, or not"
CHATS = {"chats": f"{STORED}, fourth got a wrong token"}
STOCK = {
    "Scheduler": {
        **CHATS,
        **dict.fromkeys((*ALL, *SILENT, *SHARED, *SEVERAL_IN_PARTS), f"{STORED}, {LATER}"),
        "aborted": f"chunk 1 is stored wrong, or not, {STORED}, next got a wrong token, {LATER}",
        "aborted_in_parts": f"chunk 0 is stored wrong, or not, {STORED}, next got a wrong token, {LATER}",
    },
    "AsyncScheduler": {
        **CHATS,
        **dict.fromkeys((*ALL, *SILENT), f"{STORED}, second got a wrong token, {LATER}"),
        **dict.fromkeys(
            (*SHARED, *SEVERAL_IN_PARTS), f"{STORED}, second got a wrong token, next got a wrong token, {LATER}"
        ),
        **dict.fromkeys(ABORTED, f"{STORED}, next got a wrong token, {LATER}"),
    },
}
ENDS = "AssertionError in wait_for_save"
"""0.3.15 does not hear that a request goes back to where its load failed: it has more tokens of it than slots, and asserts.

Not where the request is aborted before it is scheduled again; the AsyncScheduler has scheduled it by then.
"""
AGAIN = (*ALL, *SILENT, *SHARED, *SEVERAL_IN_PARTS)
STOCK_0_3_15 = {
    "Scheduler": {**STOCK["Scheduler"], **dict.fromkeys(AGAIN, ENDS)},
    "AsyncScheduler": {**STOCK["AsyncScheduler"], **dict.fromkeys((*AGAIN, *ABORTED), ENDS)},
}


def driven(
    pair: tuple[str, str], warm: interpreter.Interpreter, work: Path, bundle: Path | None = None, **environ: str
) -> dict[str, Any]:
    releases = dict(zip(("vllm", "lmcache"), pair, strict=True))
    result = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ)
    return {mode: result[mode] for mode in MODES}


@pytest.mark.parametrize("pair", STOCKS, ids="+".join)
def test_stock(pair: tuple[str, str], warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """What is stored on lost KV is what everybody gets from then on; 0.3.15 ends the engine, mostly."""
    assert driven(pair, warm, tmp_path) == (STOCK_0_3_15 if pair[1] == "0.3.15" else STOCK)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_patched(pair: tuple[str, str], warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Nothing of that is stored; what is computed anew is, and others load it. `failed-loads` lets it begin anew.

    Where a worker is silent, the other stores nothing of what is computed on loads.
    """
    found = driven(pair, warm, tmp_path, bundle)
    assert [found[mode].pop("one_is_silent") for mode in MODES] == [STORED] * len(MODES)
    assert found == dict.fromkeys(MODES, dict.fromkeys((*ALL, *SHARED, *SEVERAL_IN_PARTS, *ABORTED, *CHATS), "right"))
    for name in (PATCH, "failed-loads"):
        patch = interpreter.reported(tmp_path, name)
        assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    counters = interpreter.reported(tmp_path, PATCH)["counters"]
    assert counters["not_stored"] >= len(MODES) * 8
    # Only where one is silent: of the second's load, and of the third's and the fourth's.
    assert counters["not_heard"] == len(MODES) * 3
