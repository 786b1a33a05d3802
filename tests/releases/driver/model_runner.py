"""What a worker's model runner asks of its connector in a step: the runner's own code, that of both kinds."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as first


def _second() -> Any:
    """The class by which the V2 model runner asks its connector; None where the release has none."""
    try:
        return getattr(importlib.import_module("vllm.v1.worker.gpu.kv_connector"), "ActiveKVConnector", None)
    except ModuleNotFoundError:
        return None


SECOND = _second()


class Runner:
    """The part of a model runner that knows the connector. `v2`: of the V2 runner, where the release has one."""

    def __init__(self, config: Any, connector: Any, v2: bool) -> None:
        self.connector = connector
        self.active = _active(config, connector) if v2 and SECOND is not None else None

    @contextlib.contextmanager
    def step(self, scheduled: Any) -> Iterator[Any]:
        """A step around the model's: preemptions, loads, and then what the transfers came to."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        if self.active is None:
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
            with first.KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled) as output:
                yield output
            return
        output = KVConnectorOutput()
        self.active.pre_forward(scheduled)
        yield output
        getattr(self.active, "finish_forward", lambda: None)()
        (asks, *_) = inspect.signature(self.active.post_forward).parameters
        told = self.active.post_forward(scheduled if asks == "scheduler_output" else scheduled.finished_req_ids)
        vars(output).update(vars(told))


def _active(config: Any, connector: Any) -> Any:
    """Made by its own code around a stand-in, since a driver's connector has its caches by now."""
    kv_transfer_state._KV_CONNECTOR_AGENT = standing = SimpleNamespace(
        register_kv_caches=lambda *_, **__: None, set_host_xfer_buffer_ops=lambda *_, **__: None
    )
    active = SECOND(config, {})
    for name, value in vars(active).items():
        if value is standing:
            setattr(active, name, connector)
    return active
