"""What the hook does where the runtime cannot be had, and what it says of the bundle's wrapt."""

from __future__ import annotations

import json
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import hook

from tests.unit.support import PATCHED, USE_STEP, Sandbox

WHY = "the bundle cannot be used, nothing is patched: KeyError: 'x'"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of which no runtime can be made."""
    monkeypatch.setattr(hook, "_made", {})
    monkeypatch.setattr(hook, "_attempt", lambda: (None, WHY))


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("mode", "ends"), [(None, False), ("auto", False), ("strict", True), (" Strict", True)])
def test_a_bundle_that_cannot_be_used_says_so_once_and_ends_only_a_strict_process(
    monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture, mode: str | None, ends: bool
) -> None:
    if mode is not None:
        monkeypatch.setenv("LIVEPATCH", mode)
    end, says = mocker.patch.object(hook, "end_process"), mocker.patch.object(hook, "to_stderr")
    assert (hook._the_runtime(), hook._the_runtime()) == (None, None)
    (called, other) = (end, says) if ends else (says, end)
    called.assert_called_once_with(WHY)
    other.assert_not_called()


@pytest.mark.usefixtures("broken")
def test_without_a_runtime_a_module_is_loaded_as_ever_and_shows_its_own_loader(mocker: MockerFixture) -> None:
    mocker.patch.object(hook, "to_stderr")
    module, loader = ModuleType("engine"), object()
    module.__spec__, module.__loader__ = ModuleSpec("engine", None), mocker.sentinel.ours
    assert hook.before("engine", loader, module) is None
    assert (module.__spec__.loader, module.__loader__) == (loader, loader)
    bare: Any = ModuleType("bare")  # what has neither gets none
    bare.__spec__ = bare.__loader__ = None
    hook.before("bare", loader, bare)
    assert (bare.__spec__, bare.__loader__) == (None, None)
    assert hook.before("engine", loader, None) is None
    assert (hook.changed("engine", loader), hook.added("engine"), hook.is_gone("engine")) == (None, None, True)
    hook.after(module)


def test_nothing_is_gone_before_anything_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_made", {})
    assert not hook.is_gone("engine")


def test_the_form_of_wrapt_is_the_one_that_the_interpreter_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "vendor" / "wrapt"
    place.mkdir(parents=True)
    assert hook._form_of_wrapt(str(tmp_path)) == "pure"
    (place / "_wrappers.cpython-27-other.so").touch()
    assert hook._form_of_wrapt(str(tmp_path)) == "pure"
    (place / f"_wrappers{EXTENSION_SUFFIXES[0]}").touch()
    assert hook._form_of_wrapt(str(tmp_path)) == "compiled"
    monkeypatch.setenv("WRAPT_DISABLE_EXTENSIONS", "1")
    assert hook._form_of_wrapt(str(tmp_path)) == "pure"


def test_why_there_is_no_runtime_is_shown_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, hook.__name__.partition(".")[0], ModuleType("nothing of a bundle's"))
    runtime, why = hook._attempt()
    assert runtime is None
    assert why.startswith("the bundle cannot be used, nothing is patched: ")


def test_a_bundle_without_its_manifest_patches_and_has_no_digest(patched: Sandbox) -> None:
    manifests = list(patched.bundle.rglob("manifest.json"))
    assert manifests
    for manifest in manifests:
        manifest.unlink()
    assert patched.python(USE_STEP).out == PATCHED
    (file,) = patched.state.glob("*.json")
    assert json.loads(file.read_text("ascii"))["digest"] is None
