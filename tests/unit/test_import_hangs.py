"""No process hangs whose threads import targets and standard modules at once. `import_hangs` counts many more starts."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm_livepatch.sitecustomize import applying, patch_code

from tests.unit import import_hangs, interpreters


@pytest.mark.parametrize("way", import_hangs.WAYS)
@pytest.mark.parametrize("version", interpreters.found(interpreters.SERVED))
def test_no_start_hangs(tmp_path: Path, version: str, way: str) -> None:
    place = import_hangs.sandbox(tmp_path / "sandbox")
    wrong = [import_hangs.start(place, version, way, number) for number in range(3)]
    assert [said for said in wrong if said] == []


def test_a_patchs_code_is_imported_while_half_of_importlib_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen where threads import `inspect` and a target at once: 1 to 4 starts in a hundred on Python 3.13."""
    name = "vllm_livepatch.patches.kv_block_reaper.wrappers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib, "_bootstrap", None)
    assert patch_code.load("vllm_livepatch", "kv-block-reaper").__name__ == name


def test_a_patchs_code_of_which_half_is_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread imports it: Python gives out what it has so far where waiting would be a deadlock."""
    whole = SimpleNamespace(wrappers=lambda context: {"a:target": context})
    given = iter([SimpleNamespace(), whole])
    monkeypatch.setattr(patch_code, "load", lambda root, name: next(given))
    made: Any = applying.Applier._made(
        cast(Any, SimpleNamespace(_root="root")), cast(Any, SimpleNamespace(name="a")), cast(Any, "its context")
    )
    assert made == {"a:target": "its context"}


def test_what_is_half_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    answers: Iterator[Exception | None]
    answers = iter([NameError("name 'sys' is not defined"), ImportError("partially initialized module"), None])

    def step() -> str:
        error = next(answers)
        if error is not None:
            raise error
        return "all there"

    assert applying.patiently(step) == "all there"
    assert waited == [0.1, 0.1]
    answers = iter([AttributeError("no")] * 9)
    with pytest.raises(AttributeError):
        applying.patiently(step)
    assert len(waited) == 5
