"""What is deployed: the parts of a topology, their commands and their environments.

A topology is a file of data, `topologies/NAME.toml`: its parts in order of need, and what is particular to each. What
all engines, LMCache servers and routers have in common is here, once. `${PART.NAME}` stands for where a part is
(`host`) or one of its ports, so that the same file serves this machine and a cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import proxy
from vllm_livepatch.tools.lab.options import TOPOLOGIES, names
from vllm_livepatch.tools.lab.supervisor import Part
from vllm_livepatch.tools.toml import tomllib

_PORTS = range(17001, 32768)
"""Below Linux's own for connections, and above those of which Mooncake's transfer engine takes two (15000 to 17000)."""
_given: set[int] = set()
"""Ports that were given out before: to another setup, whose parts may not have bound them yet."""
_SHARED_CORES = Path(__file__).with_name("shared_cores")
MODEL_NAME = "tiny"
PROXY = "mooncake_connector_proxy.py"
"""Upstream's example, as it is called; a cluster's node has it from vLLM's `examples/disaggregated`."""
BLOCK_SIZE = 32
"""Tokens in a block of the engine's KV cache."""
CHUNK_SIZE = 64
"""Tokens in a chunk of LMCache's: what is stored and loaded is a multiple of it."""
PORTS = {
    "lmcache": {"rpc": 5555, "http": 8080, "metrics": 9090},
    "store": {"rpc": 50051, "http": 9003},
    "engine": {"http": 8000, "side": 5600},
    "router": {"http": 30000, "metrics": 29000},
    "proxy": {"http": 30000},
}
"""What each kind of part listens on, and where in a cluster; `side` is the transfer's own channel."""
HEALTH = {
    "lmcache": "/healthcheck",
    "store": "/health",
    "engine": "/health",
    "router": "/health",
    "proxy": "/openapi.json",
}
SERVER = "import runpy; runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__')"
"""Starts an engine. With `-m`, unlike with `vllm serve`, each process that it spawns would import the server again."""
UNPATCHED = ("router", "proxy", "store")
"""Kinds of parts that no patch concerns: nothing is injected into them."""
_WITH_STORE = 'printf %s "$MOONCAKE_CONFIG" > "$MOONCAKE_CONFIG_PATH" && exec "$@"'
"""What sh runs before an engine that has a Mooncake store: the connector reads its configuration from a file alone."""
_MASTER = "from mooncake.cli import main; main()"
_INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Role:
    """A part as the topology's file tells it, not yet anywhere."""

    name: str
    kind: str
    """`engine`, `lmcache`, `store` (Mooncake's master), `router` or `proxy` (upstream's example, see `proxy`)."""
    beside: bool = False
    """Starts together with the part before it."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    kv_transfer: Mapping[str, Any] | None = None
    mooncake_store: Mapping[str, Any] | None = None
    """What the engine's MooncakeStoreConnector is to be configured with."""


@dataclass(frozen=True)
class Topology:
    """Parts in order of need, and the name of the one that clients ask."""

    name: str
    title: str
    ask: str
    roles: tuple[Role, ...]
    changes: tuple[str, ...] = ()
    """Patches, the lab's own (see `faults.PATCHES`) or the catalogue's, that a stock engine needs to run here."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the topology leaves open, by name: `${NAME}` stands for them."""


@dataclass(frozen=True)
class Placement:
    """Where a topology is brought up: the host of each part, and its ports by name."""

    hosts: Mapping[str, str]
    ports: Mapping[str, Mapping[str, int]]
    device: str
    """Where KV that is sent lies: `cpu` or `cuda` (which is also what ROCm calls itself)."""
    settings: Mapping[str, float] = field(default_factory=dict)

    def fill(self, value: Any) -> Any:
        """`value` (text, or lists and tables of it) with every `${...}` replaced; a port alone becomes a number."""
        if isinstance(value, Mapping):
            return {key: self.fill(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.fill(entry) for entry in value]
        if not isinstance(value, str):
            return value
        filled = _Template(value).substitute(self._words())
        return int(filled) if value.startswith("${") and filled.isdecimal() else filled

    def _words(self) -> dict[str, str]:
        words = {"device": self.device, **{name: f"{value:g}" for name, value in self.settings.items()}}
        for name, host in self.hosts.items():
            words[f"{name}.host"] = host
            words |= {f"{name}.{port}": str(number) for port, number in self.ports[name].items()}
        return words


@dataclass(frozen=True)
class Deployment:
    """Parts in order of need, and the URL at which the whole is asked."""

    parts: tuple[Part, ...]
    url: str


class _Template(string.Template):
    idpattern = r"[a-z_]+(?:\.[a-z]+)?"


def load(name: str) -> Topology:
    """Raises UserError where there is no such topology."""
    if name not in names():
        raise UserError(f"there is no topology {name!r}: there are {', '.join(names())}")
    data = tomllib.loads((TOPOLOGIES / f"{name}.toml").read_text(encoding="utf-8"))
    roles = tuple(Role(**part) for part in data["part"])
    return Topology(name, data["title"], data["ask"], roles, tuple(data.get("changes", ())), data.get("settings", {}))


def set_up(topology: Topology, texts: Collection[str]) -> Topology:
    """The topology with `NAME=NUMBER` texts for its settings. Raises UserError where it has no such setting."""
    settings = dict(topology.settings)
    for text in texts:
        name, _, value = text.partition("=")
        if name not in settings or not re.fullmatch(r"\d+(\.\d+)?", value):
            known = ", ".join(f"{key}={usual:g}" for key, usual in topology.settings.items()) or "none"
            raise UserError(f"--with {text}: write NAME=NUMBER; the settings of {topology.name} are: {known}")
        settings[name] = float(value)
    return replace(topology, settings=settings)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now, no two alike in this process.

    They are not of those that Linux gives to connections: a part may bind its port minutes from now.
    """
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as entry, contextlib.suppress(OSError):  # somebody has it
            entry.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                found.append(port)
    return found


def here(topology: Topology, device: str = "cpu") -> Placement:
    """All parts on this machine's loopback, on ports that are free now."""
    free = iter(free_ports(sum(len(PORTS[role.kind]) for role in topology.roles)))
    ports = {role.name: {name: next(free) for name in PORTS[role.kind]} for role in topology.roles}
    return Placement({role.name: "127.0.0.1" for role in topology.roles}, ports, device, topology.settings)


def command(role: Role, placement: Placement, model: str, bind: str) -> list[str]:
    """What starts a part on a machine where its packages are installed, listening on the address `bind`."""
    return [*_before(role), *_words(role, placement, model, bind)]


def _before(role: Role) -> list[str]:
    return [] if role.mooncake_store is None else ["sh", "-c", _WITH_STORE, "sh"]


def _words(role: Role, placement: Placement, model: str, bind: str) -> list[str]:
    port = {name: str(number) for name, number in placement.ports[role.name].items()}
    if role.kind == "lmcache":
        words = ["lmcache", "server", "--host", bind, "--port", port["rpc"], "--http-host", bind]
        words += ["--http-port", port["http"], "--prometheus-port", port["metrics"], "--eviction-policy", "LRU"]
    elif role.kind == "router":
        words = ["vllm-router", "--host", bind, "--port", port["http"]]
        words += ["--prometheus-host", bind, "--prometheus-port", port["metrics"]]
    elif role.kind == "proxy":
        words = ["python", PROXY, "--host", bind, "--port", port["http"]]
    elif role.kind == "store":
        words = ["mooncake_master", "--rpc_address", bind, "--rpc_port", port["rpc"]]
        words += ["--metrics_host", bind, "--metrics_port", port["http"]]
    else:
        words = ["vllm", "serve", model, "--host", bind, "--port", port["http"]]
    words += [str(word) for word in placement.fill(role.arguments)]
    if role.kv_transfer is not None:
        words += ["--kv-transfer-config", json.dumps(placement.fill(role.kv_transfer))]
    return words


def own_environment(role: Role, placement: Placement) -> dict[str, str]:
    """The variables that the topology sets for a part."""
    found = {name: str(placement.fill(value)) for name, value in (role.environment or {}).items()}
    if role.mooncake_store is not None:
        found["MOONCAKE_CONFIG"] = json.dumps(placement.fill(role.mooncake_store))
        found["MOONCAKE_CONFIG_PATH"] = f"{role.name}-store.json"  # where the part runs
    return found


def health(role: Role, placement: Placement) -> str:
    """The URL that answers 200 when the part serves."""
    return f"http://{placement.hosts[role.name]}:{placement.ports[role.name]['http']}{HEALTH[role.kind]}"


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


def with_path(injected: Mapping[str, str], further: Sequence[str]) -> dict[str, str]:
    """The same with further directories at the end of PYTHONPATH."""
    path = os.pathsep.join([*filter(None, [injected.get("PYTHONPATH")]), *further])
    return {**injected, **({"PYTHONPATH": path} if path else {})}


def local(
    topology: Topology,
    python: Path,
    model: Path,
    injected: Mapping[str, str],
    router: Path | None = None,
    device: str = "cpu",
) -> Deployment:
    """The topology on this machine, on CPU (or one GPU: ``cuda``), with a tiny model.

    ``python`` is the interpreter of the environment that has the engines' and servers' packages, ``router`` of the one
    that has the router's, if that is another. ``injected`` (PYTHONPATH and the like) goes to engines and servers.
    """
    placement = here(topology, device)
    if device == "cpu" and sum(role.kind == "engine" for role in topology.roles) > 1:
        # Each would bind a thread to every core and keep it spinning: handshakes then time out on a small machine.
        injected = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **injected}
        injected = with_path(injected, [str(_SHARED_CORES)])
    parts = tuple(
        _local_part(role, placement, router or python, model, {})
        if role.kind == "router"
        else _local_part(role, placement, python, model, {})
        if role.kind == "proxy"
        else _local_part(role, placement, python, model, injected)
        for role in topology.roles
    )
    return Deployment(parts, f"http://{placement.hosts[topology.ask]}:{placement.ports[topology.ask]['http']}")


def _local_part(role: Role, placement: Placement, python: Path, model: Path, injected: Mapping[str, str]) -> Part:
    words = _words(role, placement, str(model), "127.0.0.1")
    variables = own_environment(role, placement)
    program = [str(python.parent / words[0])]
    if role.kind == "engine":
        # The command itself wants a distribution called "vllm"; the CPU build's is called "vllm-cpu".
        program, words = [str(python), "-c", SERVER], ["", "--model", *words[2:]]
        words += ["--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager"]
        words += ["--block-size", str(BLOCK_SIZE), "--max-model-len", "2048"]
        if placement.device == "cpu":
            variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
        else:
            # As much KV as on CPU. Of the GPU's memory each engine may have a part: several share it.
            words += ["--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.2"]
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # /reset_prefix_cache
        variables["VLLM_HOST_IP"] = "127.0.0.1"  # else Mooncake's worker listens where the machine's name resolves to
        # Else vllm-router asks over a connection that an engine closes when it goes on after a stop of more than 5 s.
        variables["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "120"
        # Else NIXL's UCX reads the other process's memory by itself (cma), also of one that is stopped.
        variables["UCX_TLS"] = "tcp"
    elif role.kind == "proxy":
        program, words = [str(python), str(proxy.place())], words[1:]
    elif role.kind == "store":
        program = [str(python), "-c", _MASTER]
    elif role.kind == "lmcache":
        if placement.device == "cpu":
            # Else the engine's CPU worker and the server have no way of transfer in common.
            words += ["--supported-transfer-mode", "auto"]
        words += ["--chunk-size", str(CHUNK_SIZE), "--l1-size-gb", "1", "--l1-init-size-gb", "1"]
    return Part(
        name=role.name,
        command=(*_before(role), *program, *words[1:]),
        environment=environment(python, {**variables, **injected}),
        health=health(role, placement),
        up_within=300 if role.kind == "engine" else 180,
        beside=role.beside,
    )
