# mypy: disable-error-code="import-not-found"
"""Ask one release for NIXL's push mode; print what it has of it, as one JSON object.

What to expect of which release is none of this script's business.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import importlib

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


def connector(name: str) -> str:
    """The class that the release's factory gives for a connector's name, or its error."""
    try:
        return KVConnectorFactory.get_connector_class_by_name(name).__name__
    except ValueError as error:
        return f"ValueError: {error}"


def module(name: str) -> bool:
    """Whether the release has it, and it can be imported."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # it is there, and lacks something else
        return False
    return True


def main() -> None:
    result = {
        "pull": connector("NixlConnector"),
        "push": connector("NixlPushConnector"),
        "worker": module(f"{V1}.nixl.push_worker"),
        "asked_for_work": hasattr(KVConnectorBase_V1, "has_pending_push_work"),
    }
    print_result(result, vllm)


if __name__ == "__main__":
    main()
