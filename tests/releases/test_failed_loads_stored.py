"""Who is computed because a load failed is stored in LMCache as it is computed, and by its own blocks.

LMCache's multi-process connector goes on with what it noted for the load. Under vLLM's default policy such a request ends
with an error on stock, so that it shows where somebody has set `recompute`; `failed-loads` computes it by default.
"""

from __future__ import annotations

from pathlib import Path

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER = "failed_loads_stored"
NEWEST = registry.pins("lmcache")[-1].version
VLLM = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.20")]
"""Before, vLLM's connector counts tokens more than once, and stores chunks too early of whatever is computed in parts."""
WITH_BLOCKS = "0.26"
"""Before, a MultiConnector gives LMCache's connector no blocks of what others load, or what is computed."""
OWN = ["0.4.7", "0.5.0", "0.5.4", "0.5.5", "0.5.6"]
OTHERS = "a store of KV that is not its prompt's"


def play(
    warm: interpreter.Interpreter, work: Path, vllm: str, which: str, lmcache: str, bundle: Path | None = None
) -> dict[str, dict[str, str]]:
    """What each case came to, by scheduler class."""
    releases = {"vllm": vllm, "lmcache": lmcache}
    worlds: dict[str, dict[str, str]] = warm.run(DRIVER, releases, work, bundle=bundle, arguments=[which])["worlds"]
    assert len(worlds) == 2
    return worlds


@pytest.mark.parametrize("which", ["builtin", "lmcache"])
def test_stock(which: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Right where a request ends whose load failed; where it is computed, LMCache keeps other KV than its prompt's."""
    for found in play(warm, tmp_path, "0.33.0", which, NEWEST).values():
        by_default = {name: outcome for name, outcome in found.items() if "default" in name}
        assert by_default == dict.fromkeys(by_default, "finishes")
        assert found[f"{which} recompute pulled"] == found[f"{which} recompute own_in_part"] == OTHERS


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], VLLM))
def test_vllms_connector(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    for found in play(warm, tmp_path, release, "builtin", NEWEST, bundle).values():
        known = [name for name in found if Version(release) >= Version(WITH_BLOCKS) or "pulled" not in name]
        assert {name: found[name] for name in known} == dict.fromkeys(known, "finishes")


@pytest.mark.parametrize("lmcache", executed.chosen([NEWEST], OWN))
def test_lmcaches_connector(lmcache: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    for found in play(warm, tmp_path, "0.29.0", "lmcache", lmcache, bundle).values():
        assert found == dict.fromkeys(found, "finishes")
