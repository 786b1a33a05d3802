"""What stands in the place of a method of one object."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize.context import PatchContext


class Connector:
    def ask(self, request: str, computed: int = 0) -> str:
        """Answer."""
        return f"{request} {computed}"


@pytest.fixture
def context() -> PatchContext:
    return PatchContext("any", {}, {}, lambda: None)


def test_a_mock_in_the_place_of_a_method_stays_its_owners(context: PatchContext, mocker: MockerFixture) -> None:
    connector: Any = mocker.Mock()
    connector.ask.return_value = 1
    method = connector.ask
    connector.ask = context.over(method, lambda *args: method(*args) + 1)
    assert connector.ask("a") == 2
    assert connector.ask.call_count == 1
    connector.ask.assert_called_once_with("a")
    connector.ask.side_effect = [5]
    assert connector.ask("b") == 6


def test_it_is_described_as_the_method(context: PatchContext) -> None:
    connector: Any = Connector()
    method = connector.ask
    connector.ask = context.over(method, lambda *args: "patched")
    assert connector.ask("a") == "patched"
    assert connector.ask.__wrapped__ == method
    assert connector.ask.__name__ == "ask"
    assert connector.ask.__self__ is connector
    assert inspect.signature(connector.ask) == inspect.signature(method)
