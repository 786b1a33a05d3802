"""LMCache before its server reserved memory that a worker fills itself, which `lmcache-unfilled-stores` is about.

0.4.7 is not among them: it reserves too.
"""

from __future__ import annotations

from pathlib import Path

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

PATCH = "lmcache-unfilled-stores"
EARLIER = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) < Version("0.4.7")]
WITHOUT = executed.chosen(EARLIER[-2:], EARLIER)
NOT_ASKED = {"asked": False, "serves": None}
BY_MESSAGE = {
    "asked": True,
    "serves": "NonGPUTransferModule",
    "keeps_what_is_reserved": False,
    "answer": {},
    "reserves": False,
}
"""What is stored comes in a message: the worker is given no place for it."""


@pytest.mark.parametrize("release", WITHOUT)
def test_nothing_is_reserved(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """To 0.4.5 the server is not asked for a place; that of 0.4.6 gives none."""
    found = warm.run("lmcache_without_shared_stores", {"lmcache": release}, tmp_path)
    found.pop("lmcache")
    assert found == (BY_MESSAGE if release == "0.4.6" else NOT_ASKED)
