"""Each LMCache that shares memory with its workers: a real server, whose worker goes within a store; contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_unfilled_stores"
PATCH = "lmcache-unfilled-stores"
RELEASES = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.4.7")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel. This release cannot be imported without its compiled modules."""

RIGHT, WRONG, NONE = [64, True, True], [64, True, False], [0]
"""A hit of two chunks that is loaded well: with its contents, with others. No hit."""
FAILED = [64, False, False]
"""A hit whose load is reported as failed."""

PATCHED = {
    "goodbye": [NONE, RIGHT],
    "death": [0, NONE, RIGHT],
    # Of what the others stored meanwhile nothing is overwritten, and what was kept from them is given back.
    "copies_after_its_goodbye": [NONE, RIGHT, RIGHT, 2],
    "copies_after_it_was_forgotten": [NONE, RIGHT, RIGHT, 2],
    "copies_for_long": [NONE, RIGHT],
    # As much is taken as what was stored needs. Not mended: the worker's own loads fail, and are reported so.
    "cannot_map_the_pool": [FAILED, RIGHT, RIGHT, 2],
    # So it is on stock. Version 5 gave the memory to others into which the first still copied.
    "another_of_its_number": [RIGHT, RIGHT],
    # Nobody knows which of the two has ended.
    "two_of_one_request": [NONE, NONE],
    # When both have ended, nobody copies into their room, and nothing is remembered of them.
    "many_of_one_request": [0, 0],
}

FORGETS = ("death", "copies_after_it_was_forgotten")
"""A server of 0.4.7 knows a worker as long as it runs."""
ONE_NUMBER = ("another_of_its_number",)
"""To 0.4.7 a worker's number is the id of its process."""


def patched(release: str) -> dict[str, Any]:
    return of_release(release, PATCHED)


def of_release(release: str, cases: dict[str, Any]) -> dict[str, Any]:
    left_out = ONE_NUMBER if forgets(release) else FORGETS
    return {case: came for case, came in cases.items() if case not in left_out}


def forgets(release: str) -> bool:
    return Version(release) >= Version("0.5.0")


def stock(release: str) -> dict[str, Any]:
    expires_into_a_hit = Version(release) < Version("0.5.6")
    found = {
        "goodbye": [WRONG, WRONG],
        "death": [0, WRONG, WRONG],
        "copies_for_long": [WRONG if expires_into_a_hit else NONE, RIGHT if expires_into_a_hit else NONE],
        "cannot_map_the_pool": [NONE, NONE, WRONG, 2],
        "another_of_its_number": [RIGHT, RIGHT],
        "two_of_one_request": [[32, True, False], [32, True, True]],
        "many_of_one_request": [60, 0],  # what was reserved first is so until its time is over
    }
    return of_release(release, found)


def driven(
    release: str, warm: interpreter.Interpreter, work: Path, *cases: str, bundle: Path | None = None
) -> dict[str, Any]:
    releases = {"vllm": "0.29.0"} if release == INSTALLED else {"vllm": "0.29.0", "lmcache": release}
    found: dict[str, Any] = warm.run(DRIVER, releases, work, bundle=bundle, arguments=cases)["cases"]
    return found


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    expected = stock(release)
    assert driven(release, warm, tmp_path, *expected) == expected


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    expected = patched(release)
    assert driven(release, warm, tmp_path, *expected, bundle=bundle) == expected
    reports = [interpreter.read(file, PATCH) for file in (tmp_path / "state").glob("*.json")]
    assert {one["verdict"] for one in reports if one["state"] == "applied"} == {"needed"}
    stderr = (tmp_path / "stderr").read_text("utf-8", "replace")
    assert stderr.count("2 chunks that it did not fill are kept apart") == (4 if forgets(release) else 2), (
        "one of each server whose worker went within a store that never ended, or late"
    )
