"""A patch with targets in two packages: both or none, whichever is imported last."""

from __future__ import annotations

import json
import shutil

from tests.unit.support import STEP, Cli, Sandbox

SEND = "otherengine.io:send"
USE = "from fakeengine.scheduler import Scheduler; from otherengine.io import send; print(Scheduler().step(7), send(8))"


def test_both_or_none(sandbox: Sandbox, cli: Cli) -> None:
    other = {"otherengine/__init__.py": "", "otherengine/io.py": "def send(item):\n    return [item]\n"}
    sandbox.write(other)
    sandbox.patch(targets=[STEP, SEND])
    sandbox.generate()
    question = ["check", "--site-packages", str(sandbox.site), "--patch-dir", str(sandbox.patches), "--only", "--json"]

    def verdict() -> str:
        (found,) = json.loads(cli(*question).out)["patches"]
        return str(found["verdict"])

    assert verdict() == "needed"
    assert sandbox.python(USE).out == "['patched', 7] ['patched', 8]\n"
    assert sandbox.python("from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))").out == "[7]\n"
    sandbox.write({"otherengine/io.py": "def send(item):\n    return [item, item]\n"})
    assert verdict() == "drifted"
    assert sandbox.python(USE).out == "[7] [8, 8]\n"
    shutil.rmtree(sandbox.site / "otherengine")
    assert verdict() == "drifted"
    done = sandbox.python("from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))")
    assert (done.out, done.others) == (
        "[7]\n",
        [f"vllm-livepatch: around is not applied (drifted): fakeengine 1.0 has no {SEND}"],
    )
