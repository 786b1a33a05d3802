"""No process hangs whose threads import targets and standard modules at once. `import_hangs` counts many more starts."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import applying, patch_code

from tests.unit import import_hangs, interpreters


@pytest.mark.parametrize("way", import_hangs.WAYS)
@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_no_start_hangs(tmp_path: Path, version: str, way: str) -> None:
    place = import_hangs.sandbox(tmp_path / "sandbox")
    wrong = [import_hangs.start(place, version, way, number) for number in range(3)]
    assert [message for message in wrong if message] == []


def test_a_patchs_code_is_imported_while_half_of_importlib_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen where threads import `inspect` and a target at once: 1 to 4 starts in a hundred on Python 3.13."""
    name = "vllm_livepatch.patches.kv_block_reaper.wrappers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib, "_bootstrap", None)
    assert patch_code.load("vllm_livepatch", "kv-block-reaper").__name__ == name


def test_a_patchs_code_of_which_half_is_there_is_waited_for(mocker: MockerFixture) -> None:
    """Another thread imports it: Python gives out what it has so far where waiting would be a deadlock."""
    whole = SimpleNamespace(wrappers=lambda context: {"a:target": context})
    mocker.patch.object(time, "sleep")
    load = mocker.patch.object(patch_code, "load", autospec=True, side_effect=[SimpleNamespace(), whole])
    made: Any = applying.Applier._made(
        cast(Any, SimpleNamespace(_root="root")), cast(Any, SimpleNamespace(name="a")), cast(Any, "its context")
    )
    assert made == {"a:target": "its context"}
    assert load.call_args_list == [mocker.call("root", "a")] * 2


def test_what_is_half_there_is_waited_for(mocker: MockerFixture) -> None:
    sleep = mocker.patch.object(time, "sleep")
    errors = [NameError("name 'sys' is not defined"), ImportError("partially initialized module")]
    assert applying.patiently(mocker.Mock(side_effect=[*errors, "all there"])) == "all there"
    assert sleep.call_args_list == [mocker.call(0.1)] * 2
    missing = mocker.Mock(side_effect=AttributeError("no"))
    with pytest.raises(AttributeError):
        applying.patiently(missing)
    assert (missing.call_count, sleep.call_count) == (4, 5)
