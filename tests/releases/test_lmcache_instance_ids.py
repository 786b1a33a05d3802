"""Two workers whose processes have one number, as in containers, at each LMCache's real server: whose KV is where; contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "lmcache_instance_ids"
PATCH = "lmcache-instance-ids"
RELEASES = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) < Version("0.5.0")]
MENDED = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) >= Version("0.5.0")]
INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel."""
TRANSFER = Path(__file__).parents[2] / "patches" / "mp_block_transfer" / "transfer.py"

RIGHT, WRONG = [96, True, True], [96, True, False]
"""Three chunks are a hit, and the load ended well: with the prompt's contents, or others."""

PATCHED: dict[str, Any] = {"loads": [[*RIGHT, True], [*RIGHT, True]], "stores": [RIGHT, RIGHT], "ended": [RIGHT]}


def driven(release: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None) -> dict[str, Any]:
    releases = {} if release == INSTALLED else {"lmcache": release}
    environ = {"LIVEPATCH_LMCACHE_INSTANCE_IDS": "on"}
    found = warm.run(DRIVER, releases, work, bundle=bundle, environ=environ, arguments=[str(TRANSFER)])
    cases: dict[str, Any] = found["cases"]
    return cases


def stock(release: str) -> dict[str, Any]:
    """To 0.4.4 the server has the cache of the worker that came last, from 0.4.5 on of the first."""
    overwritten, foreign = [*WRONG, False], [*WRONG, True]
    of_the_last = Version(release) < Version("0.4.5")
    return {
        "loads": [foreign, overwritten] if of_the_last else [overwritten, [*RIGHT, True]],
        "stores": [WRONG, WRONG],
        # The server knows the other no more: to 0.4.6 it says so, and in 0.4.7 a load is never answered.
        "ended": [[0]] if Version(release) < Version("0.4.7") else "raises: AssertionError: it never came about",
    }


@pytest.mark.parametrize("release", executed.chosen(["0.4.6"], RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    assert driven(release, warm, tmp_path) == stock(release)


@pytest.mark.parametrize("release", executed.chosen(["0.4.6"], RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    assert driven(release, warm, tmp_path, bundle) == PATCHED
    reports = [interpreter.read(file, PATCH) for file in (tmp_path / "state").glob("*.json")]
    (report,) = [one for one in reports if one["counters"]]
    assert (report["state"], report["verdict"], report["counters"]) == ("applied", "needed", {"numbered": 6})


@pytest.mark.parametrize("release", executed.chosen(MENDED[:1], MENDED))
def test_the_releases_that_have_it_mended(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    assert driven(release, warm, tmp_path) == PATCHED
