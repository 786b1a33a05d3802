"""Show in a release's real metrics what a MultiConnector's children tell; print what came of it, as JSON.

The configuration, the children's statistics, their way to the API server and the metrics are the release's. No engine runs.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import sys
import tempfile
from pathlib import Path
from typing import Any

import mooncake_sides as sides
import real_scheduler as real
import vllm
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
except ImportError:  # to 0.18.1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPrometheus as KVConnectorProm

CHILDREN = ("MooncakeConnector", "NixlConnector")


def tells(name: str) -> bool:
    """Whether the release has this connector tell anything of its transfers."""
    kind = KVConnectorFactory.get_connector_class_by_name(name)
    return bool(kind.get_kv_connector_stats is not KVConnectorBase_V1.get_kv_connector_stats)


def child(name: str) -> Any:
    """A connector of this name, of which no part is made but what it tells: one failed transfer."""
    kind = KVConnectorFactory.get_connector_class_by_name(name)
    stats = kind.build_kv_connector_stats()
    stats.record_failed_transfer()
    made = object.__new__(kind)
    vars(made)["get_kv_connector_stats"] = lambda: stats
    return made


def stats(*names: str) -> Any:
    """What a MultiConnector of these children tells, as it comes to the API server: of those that tell anything."""
    kind = KVConnectorFactory.get_connector_class_by_name("MultiConnector")
    multi = object.__new__(kind)
    multi._connectors = [child(name) for name in names if tells(name)]
    stats = multi.get_kv_connector_stats() or kind.build_kv_connector_stats()
    payload = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    sent = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=payload))
    return MsgpackDecoder(SchedulerStats).decode(sent).kv_connector_stats


def shown() -> float:
    """How many failed transfers of NIXL's the metrics show."""
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return sum(one.value for one in samples if one.name == "vllm:nixl_num_failed_transfers_total")


def found() -> dict[str, Any]:
    """What the metrics and the log show of two children, and whether they raise."""
    real.quiet()
    with tempfile.TemporaryDirectory() as directory:
        config = sides.make_config(real.make_model_config(Path(directory)), "kv_both", "engine", {})
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in CHILDREN]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id="engine",
        kv_connector_extra_config={"connectors": children},
    )
    metrics = KVConnectorProm(config, ["model_name", "engine"], {0: ["model", "0"]})
    metrics.observe(stats("NixlConnector"), 0)
    before, raised = shown(), None
    try:
        metrics.observe(stats(*CHILDREN), 0)
    except AssertionError as error:
        raised = str(error).partition(" contained")[0]
    logged: list[Any] = []
    log = KVConnectorLogging(config.kv_transfer_config)
    log.observe(stats(*CHILDREN))
    log.log(lambda *words: logged.extend(words))
    return {
        "before": before,
        "after": shown(),
        "raised": raised,
        "logged": all(name in str(logged) for name in ("MooncakeConnector", "Nixl")),
        "tell": [name for name in CHILDREN if tells(name)],
    }


def main() -> None:
    """Print what came of it."""
    print_result(found(), vllm)


if __name__ == "__main__":
    main()
    sys.exit(0)
