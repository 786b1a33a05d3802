"""What is said of a pair of releases without running them, against what happens when the factory makes the connector."""

from __future__ import annotations

from pathlib import Path

import interpreter
import pytest
from vllm_livepatch.tools import pairs, published

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


@pytest.mark.parametrize(("vllm", "lmcache"), PAIRS)
def test_what_is_said_happens(vllm: str, lmcache: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Each way to ask for a connector gives the class that was told, and can be made if that was told."""
    pair = pairs.look(published.tree("vllm", vllm), published.tree("lmcache", lmcache), (vllm, lmcache))
    assert pair.connectors
    # One process each, as in a deployment: what one connector imported does not help the next.
    for number, told in enumerate(pair.connectors):
        work = tmp_path / str(number)
        work.mkdir()
        way = told.name if told.module_path is None else f"{told.name}={told.module_path}"
        result = warm.run("pairs", {"vllm": vllm, "lmcache": lmcache}, work, arguments=[way])
        (happened,) = result["outcomes"]
        assert (happened["outcome"] == "works") == told.works, (told.asked, happened, told.problems)
        if happened["class"] is not None:
            assert happened["class"] == told.cls, told.asked
        if not told.works:
            words = [problem.subject.rpartition(":")[2].rpartition(".")[2] for problem in told.problems]
            assert any(word in happened["outcome"] for word in words), (happened, told.problems)
