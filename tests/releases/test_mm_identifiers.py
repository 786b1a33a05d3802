"""Two engines whose images nobody hashes share an LMCache server; contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

DRIVER, PATCH = "mm_identifiers", "mm-identifiers"
LMCACHE = registry.pins("lmcache")[-1].version
RELEASES = [pin.version for pin in registry.pins("vllm") if Version(pin.version) >= Version("0.29.0")]
"""Those that the newest LMCache serves. The proof has the names of all."""
TEXT = 32
"""The tokens of the chunk before the image, which is everybody's."""


def driven(release: str, warm: interpreter.Interpreter, work: Path, bundle: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = warm.run(DRIVER, {"vllm": release, "lmcache": LMCACHE}, work, bundle=bundle)
    return found


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The second engine's first image is answered from the KV of the first engine's."""
    assert driven(release, warm, tmp_path)["came"] == [[0, True], [96, False], [TEXT, True]]


@pytest.mark.parametrize("release", executed.ends(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    found = driven(release, warm, tmp_path, bundle)
    assert found["came"] == [[0, True], [TEXT, True], [96, True]]
    patch = interpreter.reported(tmp_path, PATCH, found["pid"])
    assert (patch["state"], patch["verdict"], patch["counters"]) == ("applied", "needed", {"hashed": 3}), patch
