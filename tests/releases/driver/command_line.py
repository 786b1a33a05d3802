"""What a release's `vllm serve` makes of its arguments. Annotations are no strings here: the release reads them."""

# mypy: disable-error-code="import-not-found"

import dataclasses
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import get_kwargs


@dataclasses.dataclass
class Arguments:
    """What vLLM makes arguments of the command line of."""

    kv_transfer_config: KVTransferConfig | None = None
    """It is read as JSON."""


def transfer_config(text: str) -> Any:
    """What `--kv-transfer-config TEXT` comes to."""
    return get_kwargs(Arguments)["kv_transfer_config"]["type"](text)
