"""Stores that fail on each LMCache's real server: what others are given of them, at once and later; contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_failed_copies"
PATCH = "lmcache-failed-copies"
EVERY = [pin.version for pin in registry.pins("lmcache")]
RELEASES = [release for release in EVERY if Version(release) < Version("0.5.6")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel."""
TRANSFER = Path(__file__).parents[2] / "patches" / "mp_block_transfer" / "transfer.py"
ENVIRON = {"LIVEPATCH_LMCACHE_FAILED_COPIES": "on", "LIVEPATCH_LMCACHE_BOUNDED_WAITS": "off"}
"""The latter lets a worker load nothing for a while after a call that was not answered, as in `an odd chunk`."""

RIGHT, WRONG, NONE = [96, True, True], [96, True, False], [0]
"""A hit of three chunks that is loaded well: with its contents, with others. No hit."""
FIRST = [32, True, True]
"""A hit of the first chunk, with its contents."""
SENT = ("too few chunks", "an odd chunk")
"""What a worker sends in a message, from 0.4.6 on."""

PATCHED: dict[str, Any] = {
    # At once, after LMCache's time, chunks that the cache lacks, and when it was stored again.
    **{case: [NONE, NONE, 0.0, RIGHT] for case in ("first copy", "amid", "last copy", "event", "end", "groups")},
    "shared": [FIRST, FIRST, RIGHT],
    "beside": [NONE, NONE, RIGHT, RIGHT],
    "gone": [NONE, 0.0, RIGHT],
    "many": [0.0, 0],
    "traced": ["ObjectKey"],
    # Nobody knows whether the device still writes there.
    "unsynchronized": [NONE, NONE, 3.0, NONE],
    **{case: [FIRST, FIRST, 1.0, RIGHT] for case in SENT},
}


def of_release(release: str, cases: dict[str, Any]) -> dict[str, Any]:
    """To 0.4.5 a server cannot be sent chunks. To 0.4.3 it has no groups of layers, and records no calls."""
    left_out = {*SENT} if Version(release) < Version("0.4.6") else set()
    left_out |= {"groups", "traced"} if Version(release) < Version("0.4.4") else set()
    return {case: came for case, came in cases.items() if case not in left_out}


def stock(release: str) -> dict[str, Any]:
    """With 0.4.4 to 0.4.6 all that was reserved is a hit at once, else after LMCache's time, and then for good."""
    at_once = Version("0.4.4") <= Version(release) < Version("0.4.7")
    failed = [WRONG if at_once else NONE, WRONG, 3.0, WRONG]
    # The copies were made, so that these are right, which LMCache does not know.
    copied = [NONE, RIGHT, 3.0, RIGHT]
    return of_release(
        release,
        {
            **dict.fromkeys(("first copy", "amid", "last copy"), failed),
            **dict.fromkeys(("event", "end", "unsynchronized"), copied),
            "groups": [*failed[:2], 6.0, WRONG],  # chunks of twice the size
            "shared": [WRONG if at_once else FIRST, WRONG, WRONG],
            "beside": [NONE, WRONG, WRONG, RIGHT] if at_once else [NONE, NONE, NONE, RIGHT],
            "gone": [WRONG, 3.0, WRONG],
            "many": [90.0, 0],
            "traced": ["ObjectKey"],
            "too few chunks": [FIRST, WRONG, 3.0, WRONG],
            # The server does not answer, and LMCache's time is over before the worker's wait.
            "an odd chunk": [WRONG, WRONG, 3.0, WRONG],
        },
    )


def driven(
    release: str, warm: interpreter.Interpreter, work: Path, cases: dict[str, Any], bundle: Path | None = None
) -> dict[str, Any]:
    releases = {} if release == INSTALLED else {"lmcache": release}
    given = [str(TRANSFER), *cases]
    found: dict[str, Any] = warm.run(DRIVER, releases, work, bundle=bundle, environ=ENVIRON, arguments=given)["cases"]
    return found


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    expected = stock(release)
    assert driven(release, warm, tmp_path, expected) == expected


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    expected = of_release(release, PATCHED)
    assert driven(release, warm, tmp_path, expected, bundle) == expected
    reports = [interpreter.read(file, PATCH) for file in (tmp_path / "state").glob("*.json")]
    assert {(one["state"], one["verdict"]) for one in reports} == {("applied", "needed")}
    counted = {kind: sum(one["counters"].get(kind, 0) for one in reports) for kind in ("deleted", "kept")}
    # Stores of three chunks, two in `shared`, three in `beside` and in `gone`, three of thirty prompts; two of a message.
    failed = sum(case in expected for case in ("first copy", "amid", "last copy", "event", "end", "groups", "traced"))
    deleted = failed * 3 + 2 + 3 + 3 + 30 * 3 + (2 * 2 if SENT[0] in expected else 0)
    assert counted == {"deleted": deleted, "kept": 3}


def test_the_release_that_has_it_mended(warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """What 0.5.6 reserves is apart from what can be read. It keeps the memory until the same is stored again."""
    expected = {
        **{case: [NONE, NONE, 3.0, RIGHT] for case in ("first copy", "amid", "last copy", "event", "end")},
        "groups": [NONE, NONE, 6.0, RIGHT],
        "shared": [FIRST, FIRST, RIGHT],
        "gone": [NONE, 3.0, RIGHT],
        "many": [90.0, 0],
        "traced": ["ObjectKey"],
        **{case: [FIRST, FIRST, 3.0, RIGHT] for case in SENT},
    }
    assert driven(INSTALLED, warm, tmp_path, expected) == expected
