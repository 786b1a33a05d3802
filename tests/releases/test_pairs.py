"""What is said of a pair of releases without running them, against what happens when the factory makes the connector."""

from __future__ import annotations

from pathlib import Path

import interpreter
import pytest
from vllm_livepatch.tools.compatibility import pairs, reads
from vllm_livepatch.tools.releases import published

PAIRS = [
    ("0.14.1", "0.3.15"),
    ("0.18.1", "0.4.5"),
    ("0.20.2", "0.4.7"),
    ("0.20.2", "0.5.6"),
    ("0.21.0", "0.4.7"),
    ("0.23.0", "0.5.0"),
    ("0.29.0", "0.5.6"),
    ("0.33.0", "0.4.3"),
]


INSTALLED = "0.5.6"
"""What the engine's environment has: the whole wheel. This release cannot be imported without its compiled modules."""


@pytest.mark.parametrize(("vllm", "lmcache"), PAIRS)
def test_what_is_announced_happens(vllm: str, lmcache: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Each way to ask for a connector gives the class that was told, and can be made if that was told."""
    pair = pairs.look(published.tree("vllm", vllm), published.tree("lmcache", lmcache), (vllm, lmcache))
    assert pair.connectors
    ways = [one.name if one.module_path is None else f"{one.name}={one.module_path}" for one in pair.connectors]
    releases = {"vllm": vllm} if lmcache == INSTALLED else {"vllm": vllm, "lmcache": lmcache}
    result = warm.run("pairs", releases, tmp_path, arguments=ways)
    for predicted, happened in zip(pair.connectors, result["outcomes"], strict=True):
        assert (happened["outcome"] == "works") == predicted.works, (predicted.asked, happened, predicted.problems)
        if happened["class"] is not None:
            assert happened["class"] == predicted.cls, predicted.asked
        if not predicted.works:
            words = [problem.subject.rpartition(":")[2].rpartition(".")[2] for problem in predicted.problems]
            assert any(word in happened["outcome"] for word in words), (happened, predicted.problems)


def test_the_list_of_what_a_pair_reads_is_of_the_newest_releases() -> None:
    """`python -m vllm_livepatch.tools.compatibility.reads` writes it."""
    assert reads.modules() == reads.newest()


def test_what_the_pairs_come_to() -> None:
    """The two that are known, by name: one is broken in each of its ways, the other sound."""

    def look(vllm: str, lmcache: str) -> pairs.Pair:
        return pairs.look(published.tree("vllm", vllm), published.tree("lmcache", lmcache))

    broken, sound = look("0.21.0", "0.4.7"), look("0.29.0", "0.5.6")
    assert (broken.broken, sound.broken) == (True, False)
    missing = {
        one.module_path: {problem.subject.rpartition(":")[2] for problem in one.problems} for one in broken.connectors
    }
    assert "KVCacheSpecKind" in missing[pairs.OWN]
    assert missing[f"{pairs.OWN}_0201"] == {"ParallelStrategy"}
    (kind,) = [
        problem for one in broken.connectors for problem in one.problems if problem.subject.endswith(":KVCacheSpecKind")
    ]
    assert pairs.found_in(kind) == "vllm 0.22.1 to 0.33.0"
    ways = {one.module_path: (one.cls, one.works) for one in sound.connectors if one.name == pairs.MP}
    assert ways == dict.fromkeys((None, pairs.OWN), (f"{pairs.OWN}:{pairs.MP}", True))
