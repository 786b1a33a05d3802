"""Releases before NIXL's push mode, which `nixl-push-failures` is about: asked for it. The newest in CI, the others by hand."""

from __future__ import annotations

from pathlib import Path

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

PATCH = "nixl-push-failures"
EARLIER = [pin.version for pin in registry.pins("vllm") if Version(pin.version) < Version("0.24")]
WITHOUT = executed.chosen(EARLIER[-1:], EARLIER)


@pytest.mark.parametrize("release", WITHOUT)
def test_there_is_no_push(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The factory knows no such connector, there is no worker for it, and no connector is asked whether it pushes."""
    found = warm.run("nixl_without_push", {"vllm": release}, tmp_path)
    found.pop("vllm")
    assert found.pop("push").startswith("ValueError: ")
    assert found == {"pull": "NixlConnector", "worker": False, "asked_for_work": False}


def test_the_first_release_with_it(warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The same questions, where there is something."""
    found = warm.run("nixl_without_push", {"vllm": "0.24.0"}, tmp_path)
    assert (found["push"], found["worker"], found["asked_for_work"]) == ("NixlPushConnector", True, True)
