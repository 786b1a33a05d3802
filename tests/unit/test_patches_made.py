"""What each patch makes of its facts, as a process makes it: its targets, and no name that a bundle has not."""

from __future__ import annotations

import importlib

import pytest
from vllm_livepatch.sitecustomize import settings
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.tools.bundles import catalogue

ENTRIES = catalogue.load()


@pytest.mark.parametrize("name", ENTRIES)
def test_a_patch_makes_something_of_each_of_its_targets_and_of_nothing_else(name: str) -> None:
    """What is not made would leave the patch unapplied, and what no fact names is verified for no release."""
    patch = ENTRIES[name].patch
    options = settings.read([patch], {}).options[name]
    module = importlib.import_module(f"vllm_livepatch.patches.{name.replace('-', '_')}.wrappers")
    for variant in patch.variants:
        context = PatchContext(name, options, variant.facts, lambda: None)
        assert set(variant.code) & set(patch.targets) <= set(module.wrappers(context)) <= set(patch.targets)
    assert "PatchContext" not in vars(module), "imported for the type checker alone: in a bundle it has another name"
