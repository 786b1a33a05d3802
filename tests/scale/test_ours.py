"""What is counted as the bundle's: by the file of its code and the module of its classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm_livepatch.sitecustomize.kit import Remembered

from tests.scale import ours

CODE = """
REMEMBERED = {"a": [1, 2]}

class Keeper:
    __slots__ = ("held",)

    def __init__(self):
        self.held = {}

def walk(number):
    return sum(each for each in range(number))
"""


@pytest.fixture
def patch() -> Iterator[Any]:
    """A patch's module, as in a bundle."""
    module: Any = ModuleType("_vllm_livepatch.patches.invented.wrappers")
    exec(compile(CODE, "/somewhere/_vllm_livepatch/patches/invented/wrappers.py", "exec"), vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_operations(patch: Any) -> None:
    """They grow with what the patch's code does, and are none for others' code."""
    counted = []
    for number in (100, 200):
        with ours.Operations() as operations:
            patch.walk(number)
            Path("a").joinpath("b")
        counted.append(operations.counted)
    assert set(counted[0]) == {"invented"}
    assert 1.5 < counted[1]["invented"] / counted[0]["invented"] <= 2


def test_kept(patch: Any) -> None:
    keepers = [patch.Keeper() for _ in range(3)]
    keepers[0].held = dict.fromkeys(range(7))
    found = {name: size for name, size in ours.kept().items() if name.startswith("invented")}
    assert found == {
        "invented.wrappers.REMEMBERED": 3,
        "invented.wrappers.Keeper": 3,
        "invented.wrappers.Keeper.held": 7,
    }


def test_an_ordered_dict_of_the_bundle_s_own_counts_as_one(patch: Any) -> None:
    keeper = patch.Keeper()
    keeper.held = Remembered(9)
    for number in range(7):
        keeper.held.remember(number, None)
    assert ours.kept()["invented.wrappers.Keeper.held"] == 7


def test_slow_fronts(patch: Any) -> None:
    """A dict whose first entries were removed, of which another has as many."""
    keeper, other = patch.Keeper(), patch.Keeper()
    keeper.held, other.held = dict.fromkeys(range(20_000)), dict.fromkeys(range(10_000))
    assert ours.slow_fronts() == []
    for number in range(10_000):
        del keeper.held[number]
    assert ours.slow_fronts() == ["invented.wrappers.Keeper.held"]
    assert len(other.held) == len(keeper.held)
