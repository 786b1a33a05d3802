"""Whether somebody has set what becomes of failed loads, by a stand-in for vLLM's configuration.

The release tests have the real one, by its constructor, by the command line, and in the engine core.
"""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.failed_loads import policy


class Config:
    """Made as pydantic makes it."""

    def __init__(__dataclass_self__: Config, *args: Any, **kwargs: Any) -> None:
        made(__dataclass_self__, kwargs)


def made(config: Config, given: dict[str, Any]) -> Config:
    vars(config).update({"kv_role": None, policy.POLICY: "fail", **given})
    policy.note(config)
    return config


def parse_dataclass(val: str) -> Config:
    """As vLLM's function of this name: pydantic fills an object that has no constructor's call."""
    return made(object.__new__(Config), json.loads(val))


def is_set(config: Any) -> bool:
    return policy.is_set(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=config)))


GIVEN = {policy.POLICY: "fail"}


@pytest.mark.parametrize("made_by", [lambda given: Config(**given), lambda given: parse_dataclass(json.dumps(given))])
@pytest.mark.parametrize(("given", "expected"), [({}, False), (GIVEN, True), ({"kv_role": "kv_both"}, False)])
def test_a_policy_is_set_where_it_was_given(made_by: Any, given: dict[str, Any], expected: bool) -> None:
    config = made_by(given)
    assert getattr(config, policy.POLICY) == "fail"
    assert is_set(config) is expected
    assert is_set(pickle.loads(pickle.dumps({"of": config}))["of"]) is expected
    assert is_set(copy.deepcopy(config)) is expected


def test_a_policy_is_set_where_it_was_assigned_later() -> None:
    config: Any = Config()
    config.kv_load_failure_policy = "fail"
    assert is_set(config)
    assert is_set(pickle.loads(pickle.dumps(config)))


def test_a_configuration_is_copied_by_its_attributes_as_on_stock() -> None:
    config = Config()
    assert set(vars(config)) == {"kv_role", policy.POLICY}
    copied = Config(**vars(config))
    assert not is_set(copied)
    assert not is_set(pickle.loads(pickle.dumps(copied)))
    elsewhere = pickle.loads(pickle.dumps(Config(**GIVEN)))
    assert is_set(Config(**vars(elsewhere)))


def test_a_configuration_that_was_made_unseen_has_its_policy() -> None:
    unseen: Any = object.__new__(Config)
    vars(unseen).update({"kv_role": "kv_both", policy.POLICY: "fail"})
    assert is_set(unseen)
    policy.note(unseen)  # by nobody that is known
    assert not is_set(unseen)
    assert not is_set(None)
