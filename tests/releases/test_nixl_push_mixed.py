"""Push workers with and without the patch, each in a process of its own: nobody is wrong or waits who does not on stock.

The other side has no bundle. With LIVEPATCH_TEST_OTHER_BUNDLE, a folder, it has that one: so fleets with an older bundle
are tried by hand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from prefill_decode_drive import nixl_site

DRIVER = "push_mixed"
RELEASES = ["0.29.0", "0.32.0", "0.33.0"]
OTHER = os.environ.get("LIVEPATCH_TEST_OTHER_BUNDLE", "none")

WELL = {"heard": "received", "contents": ["its own"], "invalid": False}
NOTHING = {"heard": "nothing", "contents": ["none"]}
AS_ON_STOCK: dict[str, Any] = {
    "first": WELL,
    "aborted": NOTHING,
    "aborted, asked": NOTHING,
    "slow": NOTHING,
    "slow, computed": WELL,
    "last": WELL,
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("release", executed.chosen(["0.32.0"], RELEASES))
def test_one_side_alone_is_as_on_stock(
    release: str, role: str, warm: interpreter.Interpreter, engine_python: Path, bundle: Path, tmp_path: Path
) -> None:
    run = warm.run(
        DRIVER,
        {"vllm": release},
        tmp_path,
        bundle=bundle,
        path=[nixl_site(engine_python)],
        arguments=[role, OTHER],
    )
    assert run["cases"] == AS_ON_STOCK
