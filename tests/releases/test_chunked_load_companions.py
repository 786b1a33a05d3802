"""`chunked-lmcache-load` beside each pinned LMCache: whole prompts stall, and parts do not, on KV of their own.

LMCache's code is the one that the patch relies on; see driver/chunked_lmcache_load.py. By hand on every release, stock too.
"""

from __future__ import annotations

from pathlib import Path

import executed
import interpreter
import pytest
from chunked_load_drive import LMCACHE, check, drive
from vllm_livepatch.tools.bundles import catalogue

PATCH = "chunked-lmcache-load"
COMPANIONS = catalogue.load()[PATCH].patch.companions["lmcache"]
OWN = "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector.request_trackers"
OWN_CLASS = [release for form in COMPANIONS if OWN in form.code for release in form.releases]
BEFORE_OWN_CLASS = [release for form in COMPANIONS if OWN not in form.code for release in form.releases]


@pytest.mark.parametrize("lmcache", executed.ends(OWN_CLASS))
def test_lmcaches_own_class(lmcache: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """The class that LMCache ships counts in blocks to 0.4.6 and in tokens after."""
    check(drive(warm, tmp_path, "0.29.0", "lmcache", bundle=bundle, lmcache=lmcache, mixes="1"))


@pytest.mark.parametrize("lmcache", executed.first(BEFORE_OWN_CLASS))
def test_the_built_in_class_beside_an_lmcache_without_one(
    lmcache: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    check(drive(warm, tmp_path, "0.16.0", "builtin", bundle=bundle, lmcache=lmcache, mixes="1"))
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch


@pytest.mark.parametrize("lmcache", executed.chosen([LMCACHE], OWN_CLASS))
def test_lmcaches_own_class_stalls_too(lmcache: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    for which, played in drive(warm, tmp_path, "0.29.0", "lmcache", lmcache=lmcache, mixes="0").items():
        assert played["head_of_line"]["outcome"].startswith("stalls"), which


@pytest.mark.parametrize("lmcache", executed.first(BEFORE_OWN_CLASS))
def test_the_built_in_class_stalls_too(lmcache: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    for which, played in drive(warm, tmp_path, "0.16.0", "builtin", lmcache=lmcache, mixes="0").items():
        assert played["head_of_line"]["outcome"].startswith("stalls"), which
