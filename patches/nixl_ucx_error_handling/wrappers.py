"""NIXL agents that vLLM makes create their UCX backend with a chosen `ucx_error_handling_mode`.

Source: ai-dynamo/nixl#2039, ai-dynamo/nixl PR#499, ROCm/RIXL PR#32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.__init__"
LOAD = "vllm.distributed.nixl_utils:_load_nixl_attr"
PACKAGES = ("nixl", "rixl", "nixl_rocm")
PARAMETER = "ucx_error_handling_mode"
MODES = ("none", "peer")


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""
    configured: str | None = None  # the mode in the configuration of the connector that is being, or was last, made

    def connector(original: Callable[..., Any], made: Any, vllm_config: Any, *rest: Any, **named: Any) -> Any:
        """Every connector begins here, a MultiConnector's too, before its worker makes an agent."""
        nonlocal configured
        configured = configured_in(vllm_config)
        for package in PACKAGES:
            take(getattr(sys.modules.get(f"{package}._api"), "nixl_agent", None))
        return original(vllm_config, *rest, **named)

    def load(original: Callable[..., Any], name: str, *rest: Any, **named: Any) -> Any:
        """From 0.21.0 all of vLLM's users of NIXL get its names here, also those that are no connectors."""
        found = original(name, *rest, **named)
        if name == "NixlWrapper":
            take(found)
        return found

    def configured_in(config: Any) -> str | None:
        """The mode in `kv_connector_extra_config`, None where it says none."""
        transfer = config.kv_transfer_config
        mode = None if transfer is None else transfer.get_from_extra_config(PARAMETER, None)
        if mode is None or mode in MODES:
            return mode
        livepatch.say("configured", f"kv_connector_extra_config has {PARAMETER}={mode!r}, which is none of {MODES}")
        return None

    def take(agent_class: Any) -> None:
        """Let agents of this class choose the mode, once: the class is shared by all that import it."""
        create = getattr(agent_class, "create_backend", None)
        if create is not None and not hasattr(create, "livepatch"):
            made: Any = livepatch.around(create, create_backend)
            made.livepatch = True
            agent_class.create_backend = made

    def create_backend(
        original: Callable[..., Any], agent: Any, backend: str, initParams: Any = None, *rest: Any, **named: Any
    ) -> Any:
        given = dict(initParams or {})
        if not backend.startswith("UCX"):
            return original(agent, backend, given, *rest, **named)
        if PARAMETER in given:
            livepatch.count("set_by_caller")
            return original(agent, backend, given, *rest, **named)
        if PARAMETER not in agent.get_plugin_params(backend):
            livepatch.tell("unknown_to_nixl", f"this NIXL's {backend} has no parameter {PARAMETER}: it is left out")
            return original(agent, backend, given, *rest, **named)
        mode = configured or livepatch.options["MODE"]
        result = original(agent, backend, {**given, PARAMETER: mode}, *rest, **named)
        taken = agent.get_backend_params(backend).get(PARAMETER)
        if taken == mode:
            livepatch.count(f"mode_{mode}")
        else:
            livepatch.tell("not_taken", f"{backend} was asked for {PARAMETER}={mode} and says {taken!r}")
        return result

    return {CONNECTOR: connector, LOAD: load}
