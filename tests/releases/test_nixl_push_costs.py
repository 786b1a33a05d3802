"""What `nixl-push-failures` adds to real push workers: no port, no thread, no file, and no more for the thousandth.

Up to 0.1.9 a decode worker listened on a port for each host of prefill, with threads for each connection that anybody
opened, until the process ended; one line of brackets ended the patch; and a registration was compared with all others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from prefill_decode_drive import nixl_site
from vllm_livepatch.tools.releases import registry

DRIVER = "push_costs"
PATCH = "nixl-push-failures"
RELEASES = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.24")]

CALLS = 60
"""At most so many more calls for a registration than the release makes, whatever waits."""


@pytest.mark.parametrize("release", executed.chosen(RELEASES[-1:], RELEASES))
def test_nothing_is_opened_and_nothing_grows(
    release: str, warm: interpreter.Interpreter, engine_python: Path, bundle: Path, tmp_path: Path
) -> None:
    runs: dict[str, dict[str, Any]] = {}
    for name in ("stock", "patched"):
        work = tmp_path / name
        work.mkdir()
        runs[name] = warm.run(
            DRIVER,
            {"vllm": release},
            work,
            bundle=bundle if name == "patched" else None,
            path=[nixl_site(engine_python)],
            arguments=["0.3" if name == "stock" else "60"],
        )
    stock, patched = runs["stock"], runs["patched"]
    assert (stock.pop("after strangers"), patched.pop("after strangers")) == ("nothing", "failed")
    few, many = patched.pop("operations")
    assert few == many <= stock.pop("operations")[0] + CALLS
    for run in runs.values():
        del run["pid"], run["vllm"]
    assert patched == stock
    assert (patched["ports"], patched["hosts"]["threads"], patched["ends"]["ours"]) == (0, 0, [0, 0, 0])
    (report,) = (tmp_path / "patched" / "state").glob("*.json")
    patch = interpreter.read(report, PATCH)
    assert (patch["state"], patch["reason"]) == ("applied", None), json.dumps(patch)
