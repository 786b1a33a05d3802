# mypy: disable-error-code="import-not-found"
"""Send requests whose `kv_transfer_params` are incomplete or odd to a release's real scheduler; print what comes of them.

The scheduler is the release's own, with its own connectors' scheduler halves: NIXL pull and push, Mooncake in each role.
No worker answers: a request that waits for a transfer waits for ever. Of a request that names too few blocks, real NIXL
workers say what comes. Run with NIXL, the release's sources, and the bundle or not, on the path.
"""

from __future__ import annotations

from result import begin_driver, leave, print_result, raised

begin_driver()

import copy
import gc
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lease_guard
import nixl_agents
import numpy
import real_scheduler as real
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

BLOCKS = [[1, 2, 3]]
CLIENTS_ID = "\u65e5".encode().decode("latin-1")
"""Of a client that sends `X-Request-Id` in UTF-8, as the API server reads it: one of its characters cannot be printed."""
NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": BLOCKS,
    "remote_engine_id": "prefill",
    "remote_request_id": f"p-{CLIENTS_ID}",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
MOONCAKE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill",
    "remote_bootstrap_addr": "http://127.0.0.1:8998",
    "transfer_id": f"t-{CLIENTS_ID}",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}
ODD: tuple[Any, ...] = (None, [], {}, "", -1, True, 1e400, ["a"], "x" * 5000, "\ud800", 1 << 40)
"""Values that no field takes; of `remote_block_ids` there are others."""
ODD_BLOCKS: tuple[Any, ...] = ([], [[]], [[-1]], [["1"]], [1, [2]], {"0": [1]}, "123", [[1 << 40]], [None], [[True]])
CLIENTS = 15


def connectors() -> dict[str, tuple[str, str]]:
    """What this release has: the class's name, and the role of its engine."""
    known = KVConnectorFactory._registry
    every = {
        "nixl": ("NixlConnector", "kv_both"),
        "nixl_push": ("NixlPushConnector", "kv_both"),
        "mooncake_decode": ("MooncakeConnector", "kv_consumer"),
        "mooncake_prefill": ("MooncakeConnector", "kv_producer"),
    }
    return {name: one for name, one in every.items() if one[0] in known}


class Engine:
    """A scheduler with a connector."""

    def __init__(self, model_config: Any, connector: str, role: str) -> None:
        make = KVTransferConfig

        def configured(**values: Any) -> Any:
            return make(**{**values, "kv_role": role, "kv_connector_module_path": None, "kv_buffer_device": "cuda"})

        real.KVTransferConfig = configured  # type: ignore[misc]
        try:
            self.scheduler = real.make_scheduler("Scheduler", model_config, (None, connector))  # type: ignore[arg-type]
        finally:
            real.KVTransferConfig = make
        self.all_blocks = real.free_blocks(self.scheduler)
        self.number = 0

    def come(self, params: Any) -> str:
        """A client comes, and its id."""
        self.number += 1
        name = f"request-{self.number}"
        request = real.make_request(name)
        request.kv_transfer_params = copy.deepcopy(params)
        self.scheduler.add_request(request)
        return name

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.scheduler.update_from_output(scheduled, real.run_model(scheduled))

    def outcome(self, params: Any) -> str:
        """What comes of one request: `computed`, `waits`, or what is raised; its client leaves in the end."""
        try:
            name = self.come(params)
            for _ in range(4):
                self.step()
            request = self.scheduler.requests.get(name)
            if request is None or request.is_finished():
                self.step()
                return "computed"
            status = real.status_name(request)
            real.abort(self.scheduler, name)
            self.step()
            return "waits" if status == "WAITING_FOR_REMOTE_KVS" else status
        except Exception as error:
            return raised(error)

    def held(self) -> int:
        return self.all_blocks - real.free_blocks(self.scheduler)


def odd_parameters(whole: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Each of them, by what is odd about it."""
    cases: dict[str, Any] = {
        "alone": {"do_remote_prefill": True},
        "a list": ["do_remote_prefill"],
        "text": "do_remote_prefill",
    }
    for field in fields:
        cases[f"no {field}"] = {name: value for name, value in whole.items() if name != field}
        odd = ODD_BLOCKS if field == "remote_block_ids" else ODD
        for number, value in enumerate(odd):
            cases[f"{field}: {number}"] = {**whole, field: value}
    return cases


def play(model_config: Any, connector: str, role: str) -> dict[str, Any]:
    """What comes of each kind of request, each on an engine of its own, and of well-formed ones."""
    push, mooncake = connector == "NixlPushConnector", connector == "MooncakeConnector"
    whole = MOONCAKE if mooncake else NIXL
    fields: tuple[str, ...] = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    fields = (*fields, "tp_size") if push else (*fields, "remote_block_ids")
    if mooncake:
        fields = ("remote_bootstrap_addr", "transfer_id", "remote_engine_id")
        if not hasattr(Engine(model_config, connector, role).scheduler.connector.connector_scheduler, "is_kv_producer"):
            fields = ("remote_host", "remote_port")
    found: dict[str, Any] = {}
    outcomes: Counter[str] = Counter()
    not_computed: list[str] = []
    for name, params in odd_parameters(whole, fields).items():
        if role == "kv_producer" and name != "alone":
            continue
        engine = Engine(model_config, connector, role)
        outcome = engine.outcome(params)
        outcomes["computed" if outcome == "computed" else "waits" if outcome == "waits" else "raises"] += 1
        if outcome != "computed" or engine.held():
            not_computed.append(f"{name}: {outcome}")
        if name == "alone":
            found["alone"] = outcome
    found["not_computed"], found["outcomes"] = not_computed, dict(outcomes)
    engine = Engine(model_config, connector, role)
    found["none"] = engine.outcome(None)
    found["another's"] = engine.outcome({"lmcache.skip_save": True})
    if role != "kv_producer":
        found["whole"] = engine.outcome(whole)
        found["both"] = Engine(model_config, connector, role).outcome({**whole, "do_remote_decode": True})
    if role != "kv_consumer":
        plain = {**dict.fromkeys(whole), "do_remote_prefill": False, "do_remote_decode": True}
        found["prefill"] = Engine(model_config, connector, role).outcome({**plain, "transfer_id": "t-2"})
    else:
        found["prefill"] = Engine(model_config, connector, role).outcome(
            {"do_remote_decode": True, "transfer_id": "t-2"}
        )
        if "remote_block_ids" in fields:
            ours = {"remote_block_ids": [[*numpy.array(BLOCKS[0])]], "tp_size": numpy.int64(1)}
            found["numpy"] = engine.outcome({**whole, **ours})
    if connector == "NixlConnector":
        back = {**NIXL, "do_remote_prefill": False, "do_remote_decode": True, "remote_num_tokens": 40}
        found["read_back"] = Engine(model_config, connector, role).outcome(back)
        found["clients_that_left"] = clients_that_left(model_config, connector, role)
    return found


def clients_that_left(model_config: Any, connector: str, role: str) -> Any:
    """How many blocks are held after clients without a `remote_host` came and went."""
    engine = Engine(model_config, connector, role)
    params = {name: value for name, value in NIXL.items() if name != "remote_host"}
    try:
        for _ in range(CLIENTS):
            name = engine.come(params)
            engine.step()
            engine.step()
            real.abort(engine.scheduler, name)
            engine.step()
    except Exception as error:
        return raised(error)
    return engine.held()


def worker_cases(model_config: Any) -> dict[str, Any]:
    """Real NIXL workers read: what is named does not fit, and then what does."""
    prefill = lease_guard.Side(model_config)
    prefill.listen()
    decode = lease_guard.Side(model_config)
    story = lease_guard.Story(prefill, decode)
    story.prefilled("p-well", [1, 2])
    story.begin("d-well", "p-well", [1, 2])  # so that both have shaken hands
    found: dict[str, Any] = {"well": story.received("d-well", [1, 2])}
    for number, (case, blocks) in enumerate({"too_few": [[5]], "none": [[]], "more_groups": [[5, 6], [7]]}.items()):
        found[case] = read(decode, prefill.engine_id, f"d-odd-{number}", blocks)
    story.prefilled("p-after", [3, 4])
    story.begin("d-after", "p-after", [3, 4])
    found["after"] = story.received("d-after", [3, 4])
    return found


def read(decode: lease_guard.Side, engine_id: str, request_id: str, blocks: Any) -> Any:
    """What a worker does with blocks that do not fit the two of the request."""
    local = [5, 6]
    metadata = decode.metadata()
    more = {"awaiting_kvs": True} if "awaiting_kvs" in lease_guard.RECEIVE else {}
    flat = [number for group in blocks for number in group]
    params = {**NIXL, "remote_block_ids": blocks if lease_guard.GROUPS else flat, "remote_engine_id": engine_id}
    metadata.add_new_req_to_recv(request_id, (local,) if lease_guard.GROUPS else local, params, **more)
    try:
        decode.worker.start_load_kv(metadata)
    except Exception as error:
        decode.worker._recving_metadata.pop(request_id, None)
        decode.worker._recving_transfers.pop(request_id, None)
        return raised(error)
    latest = time.monotonic() + lease_guard.SECONDS
    while time.monotonic() < latest:
        _, received, failed, invalid = decode.ended()
        if request_id in received | failed:
            return {"failed": bool(failed or invalid), "blocks": sorted(invalid)}
    return "waits"


def workers(model_config: Any, directory: Path) -> dict[str, Any]:
    """What real NIXL workers make of blocks that do not fit."""
    nixl_agents.begin_distributed(model_config, directory / "rendezvous")
    lease_guard.look_at_the_release(model_config)
    return worker_cases(model_config)


def main() -> None:
    real.quiet()
    gc.enable()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        result: dict[str, Any] = {name: play(model_config, *one) for name, one in connectors().items()}
        result["worker"] = workers(model_config, Path(directory))
    print_result({"cases": result}, vllm)
    leave()


if __name__ == "__main__":
    main()
