# mypy: disable-error-code="import-not-found"
"""Let vLLM load its plugins as its processes do, each way in a child of its own, and print what became of each as JSON.

`places` says which of the modules that are named as arguments are imported when vLLM's own engine core, worker and
engine arguments ask for plugins.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import os
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import vllm
from vllm import plugins

WAYS: dict[str, dict[str, str]] = {
    "auto": {},
    "strict": {"LIVEPATCH": "Strict"},
    "off": {"LIVEPATCH": "off"},
    "no word of ours": {"LIVEPATCH": "perhaps"},
    "left out": {"LIVEPATCH": "strict", "VLLM_PLUGINS": "somebody_s"},
    "all plugins": {"LIVEPATCH": "strict", "VLLM_PLUGINS": ""},
}
HIDDEN = os.environ.get("LIVEPATCH_TEST_HIDDEN")
"""A bundle that PYTHONPATH is to name in a process that it did not reach."""
if HIDDEN:
    WAYS["hidden"] = {"PYTHONPATH": HIDDEN}


class Asked(Exception):
    """In the place of the plugins' being loaded."""


def in_a_child(work: Callable[[], Any]) -> dict[str, Any]:
    """The exit code of a forked child, and what it said on stderr."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 2)
            os.dup2(output.fileno(), 1)
            work()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        lines = output.read().decode().splitlines()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "logged": [line for line in lines if line.startswith("vllm-livepatch:")],
    }


def load(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    if variables.get("VLLM_PLUGINS") == "":
        del os.environ["VLLM_PLUGINS"]
    plugins.load_general_plugins()
    plugins.load_general_plugins()  # as other parts of the same process do
    if variables.get("PYTHONPATH"):
        from vllm.v1.core.sched.scheduler import Scheduler

        print(f"vllm-livepatch: wrapped: {hasattr(Scheduler._update_from_kv_xfer_finished, '__wrapped__')}", flush=True)


def imported(ask: Callable[[], Any]) -> list[str] | None:
    """Which of the modules are there at the moment at which `ask` has vLLM load plugins; None where it does not."""
    found: list[list[str]] = []

    def asked() -> None:
        found.append([module for module in sys.argv[1:] if module in sys.modules])
        raise Asked

    plugins.load_general_plugins = asked
    try:
        ask()
    except Asked:
        return found[0]
    return None


def engine_arguments() -> None:
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model="none")


def engine_core() -> None:
    from vllm.v1.engine.core import EngineCore

    EngineCore(None, None, False)


def worker() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.rpc_rank = 0
    config = SimpleNamespace(enable_trace_function_call_for_thread=lambda: None)
    wrapper.init_worker([{"vllm_config": config}])


ways = {name: in_a_child(lambda given=given: load(given)) for name, given in WAYS.items()}
result: dict[str, Any] = {"ways": ways}
if sys.argv[1:]:
    result["places"] = {ask.__name__: imported(ask) for ask in (engine_arguments, worker, engine_core)}
print_result(result, vllm)
