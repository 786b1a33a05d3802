"""LMCache 0.4.7: what becomes of a store whose worker goes. Its server's module has another name than later ones have.

No patch knows that module, so none is named here, and the matrix has nothing of this.
"""

from __future__ import annotations

from pathlib import Path

import interpreter

HIT_WITH_OTHER_CONTENTS = [64, True, False]


def test_what_a_worker_did_not_fill_is_a_hit(warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """As on stock of 0.5.0: for the next worker, and also once another has stored that prompt."""
    releases = {"vllm": "0.29.0", "lmcache": "0.4.7"}
    found = warm.run("lmcache_unfilled_stores", releases, tmp_path, arguments=["goodbye"])["cases"]
    assert found == {"goodbye": [HIT_WITH_OTHER_CONTENTS, HIT_WITH_OTHER_CONTENTS]}
