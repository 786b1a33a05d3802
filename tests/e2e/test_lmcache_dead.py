"""An LMCache server that cannot come up ends the bring-up at once, with its log: real server, real engines beside it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import psutil
import pytest
from vllm_livepatch.tools.lab import environments, model, topology
from vllm_livepatch.tools.lab.supervisor import PartFailed, Supervisor


def test_a_dead_server_is_reported_with_its_log_while_the_engines_still_load(tmp_path: Path) -> None:
    """Its port is taken. The engines would ask for it most of a minute later, and wait for an answer then."""
    python = environments.engine()
    described = topology.load("pd-mooncake-lmcache")
    deployed = topology.local(described, python, model.make(tmp_path / "model", seed=1), {})
    server = deployed.parts[0]
    port = int(server.command[server.command.index("--port") + 1])
    started: list[dict[str, object]] = []

    async def bring_up() -> None:
        async with Supervisor(tmp_path / "parts", print) as parts:
            try:
                await parts.start(deployed.parts)
            finally:
                started.extend(parts.processes())
                assert parts.up_seconds() == {}, "no engine was up yet"

    with socket.create_server(("127.0.0.1", port)), pytest.raises(PartFailed) as failed:
        asyncio.run(bring_up())
    assert failed.value.part == "lmcache"
    assert any("Address already in use" in line for line in failed.value.tail)
    assert {process["part"] for process in started} >= {"prefill", "decode"}
    assert not [process for process in started if psutil.pid_exists(int(str(process["pid"])))]
