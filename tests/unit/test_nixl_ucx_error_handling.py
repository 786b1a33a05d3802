"""The NIXL patch on agents that differ from those of the release tests: a stand-in for NIXL's class of agents."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.nixl_ucx_error_handling import wrappers
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext


class Patched:
    """The patch's two wrappers around plain functions, and a class of agents in a module of NIXL's name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...], echoes: bool) -> None:
        class Agent:
            def __init__(self) -> None:
                self.created: dict[str, dict[str, str]] = {}

            def create_backend(self, backend: str, initParams: dict[str, str] = {}) -> str:  # noqa: B006 (as NIXL's)
                """Create."""
                self.created[backend] = initParams
                return backend

            def get_plugin_params(self, backend: str) -> dict[str, str]:
                return dict.fromkeys(known, "peer")

            def get_backend_params(self, backend: str) -> dict[str, str]:
                return self.created[backend] if echoes else {}

        self.agent_class = Agent
        self.original = Agent.create_backend
        api = ModuleType("nixl._api")
        api.nixl_agent = Agent  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nixl._api", api)
        self.context = PatchContext("nixl-ucx-error-handling", {"MODE": "none"}, {}, lambda: None)
        made = wrappers.wrappers(self.context)

        class Connector:
            def __init__(self, vllm_config: Any, role: Any = None) -> None: ...

        Connector.__init__ = guard.in_place_of(  # type: ignore[method-assign]
            Connector.__init__, made[wrappers.CONNECTOR], self.context, wrappers.CONNECTOR
        )
        self.connector = Connector
        names = {"NixlWrapper": Agent, "nixl_agent_config": object}
        self.load = guard.in_place_of(lambda name: names.get(name), made[wrappers.LOAD], self.context, wrappers.LOAD)

    def connect(self, **extra: Any) -> None:
        """Make a connector with this `kv_connector_extra_config`."""
        transfer = SimpleNamespace(get_from_extra_config=lambda name, default: extra.get(name, default))
        self.connector(vllm_config=SimpleNamespace(kv_transfer_config=transfer))


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Patched:
    """The patch, and a NIXL as it is today."""
    return Patched(monkeypatch, (wrappers.PARAMETER, "num_workers"), echoes=True)


def create(patched: Patched, backend: str = "UCX", *params: dict[str, str], **named: dict[str, str]) -> dict[str, str]:
    """What a new agent's backend is created with."""
    agent = patched.agent_class()
    assert agent.create_backend(backend, *params, **named) == backend
    return agent.created[backend]


def test_mode_however_called(patched: Patched) -> None:
    """The caller's own parameters stay, and so does the caller's dictionary."""
    patched.connect()
    own = {"num_threads": "4"}
    assert create(patched, "UCX") == {wrappers.PARAMETER: "none"}
    assert create(patched, "UCX", own) == {"num_threads": "4", wrappers.PARAMETER: "none"}
    assert create(patched, "UCX_MO", initParams=own) == {"num_threads": "4", wrappers.PARAMETER: "none"}
    assert own == {"num_threads": "4"}
    assert patched.context.counters == {"mode_none": 3}


def test_only_ucx(patched: Patched) -> None:
    """Other backends know no such parameter."""
    patched.connect()
    assert create(patched, "GDS_MT", {"thread_count": "2"}) == {"thread_count": "2"}
    assert patched.context.counters == {}


def test_class_is_taken_once(patched: Patched) -> None:
    """By either way to it, and its method still looks like itself."""
    patched.connect()
    taken = patched.agent_class.create_backend
    assert patched.load("NixlWrapper") is patched.agent_class
    patched.connect()
    assert patched.agent_class.create_backend is taken
    assert (taken.__name__, taken.__doc__) == (patched.original.__name__, patched.original.__doc__)


def test_loader_alone(patched: Patched) -> None:
    """Users of NIXL that are no connectors; other names, and a NIXL that is not there, pass through."""
    assert patched.load("nixl_agent_config") is object
    assert patched.load("nothing") is None
    assert patched.agent_class.create_backend is patched.original
    assert patched.load("NixlWrapper") is patched.agent_class
    assert create(patched) == {wrappers.PARAMETER: "none"}


def test_configured_value_that_is_none(patched: Patched, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, and counts as not configured."""
    patched.connect(ucx_error_handling_mode="off")
    assert create(patched) == {wrappers.PARAMETER: "none"}
    assert "ucx_error_handling_mode='off', which is none of ('none', 'peer')" in capsys.readouterr().err


def test_next_connector_configures_anew(patched: Patched) -> None:
    """A mode holds for the connector whose configuration says it."""
    patched.connect(ucx_error_handling_mode="peer")
    assert create(patched) == {wrappers.PARAMETER: "peer"}
    patched.connect()
    assert create(patched) == {wrappers.PARAMETER: "none"}


def test_nixl_without_the_parameter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A NIXL that would refuse it is not given it."""
    patched = Patched(monkeypatch, ("num_workers",), echoes=True)
    patched.connect()
    assert create(patched, "UCX", {"num_threads": "4"}) == {"num_threads": "4"}
    assert patched.context.counters == {"unknown_to_nixl": 1}
    assert "has no parameter ucx_error_handling_mode" in capsys.readouterr().err


def test_mode_that_is_not_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the backend says is read back."""
    patched = Patched(monkeypatch, (wrappers.PARAMETER,), echoes=False)
    patched.connect()
    create(patched)
    assert patched.context.counters == {"not_taken": 1}
    assert "was asked for ucx_error_handling_mode=none and says None" in capsys.readouterr().err


def test_no_nixl_and_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors without NIXL, and a configuration without a transfer, which the release itself refuses."""
    patched = Patched(monkeypatch, (wrappers.PARAMETER,), echoes=True)
    monkeypatch.delitem(sys.modules, "nixl._api")
    patched.connector(SimpleNamespace(kv_transfer_config=None))
    assert patched.agent_class.create_backend is patched.original


@pytest.mark.parametrize(
    ("gone", "params"), [("get_plugin_params", {}), ("get_backend_params", {wrappers.PARAMETER: "none"})]
)
def test_an_error_of_its_own_leaves_the_backend_made_once(patched: Patched, gone: str, params: dict[str, str]) -> None:
    """Before the backend is made it is made as the caller asked, and afterwards it stays."""
    patched.connect()
    setattr(patched.agent_class, gone, None)
    agent = patched.agent_class()
    made: list[Any] = []
    agent.created = type("Created", (dict,), {"__setitem__": lambda self, name, value: made.append((name, value))})()
    assert agent.create_backend("UCX") == "UCX"
    assert made == [("UCX", params)]
    assert patched.context.aside
    assert create(patched) == {}


def test_the_mode_is_that_of_the_configuration_however_the_connector_is_made(patched: Patched) -> None:
    transfer = SimpleNamespace(get_from_extra_config=lambda name, default: "peer")
    patched.connector(SimpleNamespace(kv_transfer_config=transfer), "the role")
    assert create(patched) == {wrappers.PARAMETER: "peer"}
