"""What vLLM's real KVTransferConfig comes to in the ways in which one is made, copied and sent to another process.

Of each way, on a bundle: whether somebody has set the policy, and on stock None; or the error that it ends with.
"""

# mypy: disable-error-code="import-not-found"

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from result import print_result, take_stdout

take_stdout()

import command_line
import vllm
from vllm.config import KVTransferConfig
from vllm.config.utils import replace

GIVEN = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def assigned() -> Any:
    """As a platform's plugin may."""
    config = KVTransferConfig(**GIVEN)
    config.kv_load_failure_policy = "fail"
    return config


WAYS: dict[str, Callable[[], Any]] = {
    "constructor": lambda: KVTransferConfig(**GIVEN),
    "constructor, given": lambda: KVTransferConfig(**GIVEN, kv_load_failure_policy="fail"),
    "command line": lambda: command_line.transfer_config('{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'),
    "command line, given": lambda: command_line.transfer_config('{"kv_load_failure_policy": "fail"}'),
    "assigned": assigned,
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "": lambda config: config,
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "pickled": lambda config: pickle.loads(pickle.dumps(config)),
    "replaced": replace,
    "dataclasses.replace": dataclasses.replace,
    "of its attributes": lambda config: KVTransferConfig(**vars(config)),
}


def looked_at(make: Callable[[], Any], then: Callable[[Any], Any]) -> Any:
    """Whether the policy of a configuration is set; the error where it cannot be had."""
    try:
        config = then(make())
    except Exception as error:
        return repr(error)
    module = sys.modules.get("_vllm_livepatch.patches.failed_loads.policy")
    if module is None:
        return None
    return module.is_set(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=config)))


ways = {way: {name: looked_at(make, then) for name, then in COPIES.items()} for way, make in WAYS.items()}
print_result({"vllm": vllm.__file__, "ways": ways})
