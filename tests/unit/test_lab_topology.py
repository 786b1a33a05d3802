"""The topologies: the same data gives commands for this machine and for a cluster."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import options, printing, proxy, topology

NAMES = [
    "cpu-offload",
    "engine",
    "lmcache",
    "lmcache-forgets",
    "mooncake-store",
    "pd-mooncake",
    "pd-mooncake-both",
    "pd-mooncake-lmcache",
    "pd-nixl",
    "pd-nixl-cpu-offload",
    "pd-nixl-lmcache",
    "pd-nixl-mooncake-store",
    "pd-nixl-multi",
]
KUBERNETES = "1.34"
TOGGLES = {"LIVEPATCH_KV_BLOCK_REAPER": "on"}


def option(command: Any, name: str) -> str:
    """The word behind an option."""
    words = list(command)
    return str(words[words.index(name) + 1])


def test_the_topologies_are_those_of_the_documentation() -> None:
    assert options.names() == NAMES
    with pytest.raises(
        UserError,
        match=r"no topology 'pd-nxil': there are cpu-offload, engine, lmcache, lmcache-forgets, mooncake-store, pd-",
    ):
        topology.load("pd-nxil")


@pytest.mark.parametrize("name", NAMES)
def test_every_reference_is_to_a_part_that_there_is(name: str, tmp_path: Path) -> None:
    deployed = topology.local(topology.load(name), tmp_path / "bin/python", tmp_path / "model", {})
    for part in deployed.parts:
        assert "${" not in " ".join(part.command)
        assert "${" not in " ".join(part.environment.values())
        assert part.health.startswith("http://127.0.0.1:")
    assert deployed.url in {part.health.rpartition("/")[0] for part in deployed.parts}


def test_engines_of_one_topology_share_the_cores(tmp_path: Path) -> None:
    for name, shared in (("lmcache", False), ("pd-nixl", True)):
        deployed = topology.local(topology.load(name), tmp_path / "bin/python", tmp_path / "model", {})
        engines = [part for part in deployed.parts if topology.SERVER in part.command]
        assert all((part.environment.get("OMP_NUM_THREADS") == "1") == shared for part in engines), name
        path = [part.environment.get("PYTHONPATH", "") for part in engines]
        assert all(("shared_cores" in entry) == shared for entry in path), name


def test_what_shares_cores_comes_behind_what_is_injected(tmp_path: Path) -> None:
    injected = {"PYTHONPATH": "/bundle"}
    deployed = topology.local(topology.load("pd-nixl"), tmp_path / "bin/python", tmp_path / "model", injected)
    first, second = deployed.parts[0].environment["PYTHONPATH"].split(os.pathsep)
    assert (first, Path(second).name) == ("/bundle", "shared_cores")


def test_with_shared_cores_nobody_is_bound_and_agents_rest_between_polls(tmp_path: Path) -> None:
    """The bindings are a stand-in: no more of NIXL's than the two names that its own Python interface uses."""
    package = tmp_path / "nixl_here"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_bindings.py").write_text(
        "class nixlAgentConfig:\n    pthrDelay = 0\nclass nixlAgent:\n"
        "    def __init__(self, name, config):\n        self.seen = name, config.pthrDelay\n"
    )
    program = (
        "import json, os, sys; from nixl_here import _bindings; before = os.sched_getaffinity(0)\n"
        "os.sched_setaffinity(0, [min(before)]); os.sched_yield()\n"
        "agent = _bindings.nixlAgent('a', _bindings.nixlAgentConfig())\n"
        "print(json.dumps([os.sched_getaffinity(0) == before, agent.seen]))"
    )
    shared = Path(topology.__file__).with_name("shared_cores")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(shared), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, ["a", 100]]


def test_on_a_gpu_engines_share_its_memory_and_the_server_moves_kv_as_it_does_by_default(tmp_path: Path) -> None:
    described = topology.load("pd-nixl-lmcache")
    here = topology.local(described, Path("python"), tmp_path, {}, device="cuda")
    engines = [part for part in here.parts if "--model" in part.command]
    assert len(engines) == 2
    for part in engines:
        assert option(part.command, "--kv-cache-memory-bytes") == str(1 << 30), "as much as on CPU"
        assert 2 * len(engines) * float(option(part.command, "--gpu-memory-utilization")) < 1, "two setups side by side"
        assert not [name for name in part.environment if name.startswith(("VLLM_CPU_", "OMP_"))]
        assert '"kv_buffer_device": "cuda"' in option(part.command, "--kv-transfer-config")
        assert '"cpu"' not in option(part.command, "--kv-transfer-config")
    (server,) = (part for part in here.parts if part.name == "lmcache")
    assert "--supported-transfer-mode" not in server.command


def test_the_router_has_an_environment_of_its_own_and_nothing_injected(tmp_path: Path) -> None:
    python, router = tmp_path / "engine/bin/python", tmp_path / "router/bin/python"
    injected = {"PYTHONPATH": "/bundle"}
    deployed = topology.local(topology.load("pd-nixl"), python, tmp_path / "model", injected, router)
    for part in deployed.parts:
        home = router if part.name == "router" else python
        assert part.command[0].startswith(str(home.parent))
        assert ("PYTHONPATH" in part.environment) == (part.name != "router")


def test_parts_find_each_other(tmp_path: Path) -> None:
    deployed = topology.local(topology.load("pd-nixl-lmcache"), tmp_path / "bin/python", tmp_path / "model", {})
    lmcache, prefill, decode, router = deployed.parts
    assert option(router.command, "--prefill") == prefill.health.removesuffix("/health")
    assert option(router.command, "--decode") == decode.health.removesuffix("/health")
    config = json.loads(option(prefill.command, "--kv-transfer-config"))
    nixl, mp = config["kv_connector_extra_config"]["connectors"]
    assert (nixl["kv_connector"], nixl["kv_buffer_device"]) == ("NixlConnector", "cpu")
    assert mp["kv_connector_extra_config"]["lmcache.mp.port"] == int(option(lmcache.command, "--port"))
    sides = {part.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for part in (prefill, decode)}
    assert len(sides) == 2
    assert "LMCache" not in option(decode.command, "--kv-transfer-config")


@pytest.mark.parametrize("name", ["pd-mooncake", "pd-mooncake-lmcache"])
def test_mooncake_engines_run_here_on_loopback_with_the_same_time_out(name: str, tmp_path: Path) -> None:
    described = topology.set_up(topology.load(name), ["abort_timeout=20"])
    deployed = topology.local(described, tmp_path / "bin/python", tmp_path / "model", {})
    parts = {part.name: part for part in deployed.parts}
    for part in (parts["prefill"], parts["decode"]):
        assert part.environment["VLLM_HOST_IP"] == "127.0.0.1"
        assert part.environment["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] == "20"
    asked = list(parts["router"].command)
    bootstrap = parts["prefill"].environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
    assert asked[asked.index("--prefill") + 1 :][:2] == [parts["prefill"].health.removesuffix("/health"), bootstrap]


def test_upstreams_proxy_runs_in_the_engines_environment_with_nothing_injected(tmp_path: Path) -> None:
    python, injected = tmp_path / "engine/bin/python", {"PYTHONPATH": "/bundle"}
    deployed = topology.local(topology.load("pd-mooncake-both"), python, tmp_path / "model", injected)
    prefill, decode, asked = deployed.parts
    assert asked.command[:2] == (str(python), str(proxy.place()))
    assert "PYTHONPATH" not in asked.environment
    assert deployed.url == asked.health.removesuffix("/openapi.json")
    bootstrap = prefill.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
    words = list(asked.command)
    assert words[words.index("--prefill") + 1 :][:2] == [prefill.health.removesuffix("/health"), bootstrap]
    assert option(words, "--decode") == decode.health.removesuffix("/health")


def test_a_decode_engine_with_few_blocks_reads_by_nixl_first_and_keeps_its_kv_in_lmcache(tmp_path: Path) -> None:
    described = topology.set_up(topology.load("pd-nixl-multi"), ["blocks=90"])
    deployed = topology.local(described, tmp_path / "bin/python", tmp_path / "model", {})
    lmcache, prefill, decode, _ = deployed.parts
    children = json.loads(option(decode.command, "--kv-transfer-config"))["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "LMCacheMPConnector"]
    assert children[1]["kv_connector_extra_config"]["lmcache.mp.port"] == int(option(lmcache.command, "--port"))
    assert option(decode.command, "--num-gpu-blocks-override") == "90"
    assert "LMCache" not in option(prefill.command, "--kv-transfer-config")
    assert "--num-gpu-blocks-override" not in prefill.command


@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_manifests_are_what_its_schemas_ask_for(name: str) -> None:
    described = topology.load(name)
    documents = list(yaml.safe_load_all(printing.kubernetes(described, TOGGLES)))
    assert [document["kind"] for document in documents] == ["Deployment", "Service"] * len(described.roles)
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    services = {document["metadata"]["name"] for document in documents[1::2]}
    for role, deployment in zip(described.roles, documents[::2], strict=True):
        spec = deployment["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        variables = {entry["name"]: entry for entry in container["env"]}
        injected = role.kind not in ("router", "proxy", "store")
        assert ("PYTHONPATH" in variables) == ("LIVEPATCH_KV_BLOCK_REAPER" in variables) == injected
        assert {entry["mountPath"] for entry in container["volumeMounts"]} >= ({printing.BUNDLE} if injected else set())
        for word in container["command"]:
            for peer in (other.name for other in described.roles):
                host = f"{name}-{peer}"
                assert host not in word or host in services, "a part asks for a host that no service is called"
        if "VLLM_NIXL_SIDE_CHANNEL_HOST" in variables:
            address = variables["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
            assert address == "status.podIP", "it listens there: a service's name is not its own address"


def test_the_schemas_would_find_a_mistake() -> None:
    document = next(yaml.safe_load_all(printing.kubernetes(topology.load("lmcache"), {})))
    document["spec"]["template"]["spec"]["containers"][0]["readiness"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("form", ["shell", "slurm"])
@pytest.mark.parametrize("name", NAMES)
def test_scripts_start_each_part_once_with_its_words_intact(form: str, name: str, tmp_path: Path) -> None:
    """Run the script where each program only notes how it was called, and there is a cluster of four nodes."""
    described = topology.load(name)
    for program in ("vllm", "lmcache", "vllm-router", "python", "mooncake_master"):
        note = f'#!/bin/sh\nprintf "%s\\0" {program} "$@" "$PYTHONPATH" >"{tmp_path}/called.$$"\n'
        _program(tmp_path / program, note)
    _program(tmp_path / "curl", "#!/bin/sh\n")
    _program(tmp_path / "scontrol", "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\nn4\\n'\n")
    _program(tmp_path / "srun", f'#!/bin/sh\necho "$3" >>"{tmp_path}/nodes"\nshift 3\nexec "$@"\n')
    script = tmp_path / "script"
    script.write_text(f"{printing.FORMS[form](described, TOGGLES)}\nwait\n", encoding="utf-8")
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-4]"}
    subprocess.run(["bash", str(script)], env=environment, check=False, timeout=30, cwd=tmp_path)
    called = [file.read_text(encoding="utf-8").split("\0") for file in tmp_path.glob("called.*")]
    assert len(called) == len(described.roles)
    for words in called:
        if "--kv-transfer-config" in words:
            assert json.loads(option(words, "--kv-transfer-config"))["kv_role"].startswith("kv_")
        if words[0] in ("vllm", "lmcache") and form == "slurm":
            assert words[-2] == printing.BUNDLE
    for role in described.roles:
        if role.mooncake_store is not None:
            stored = json.loads((tmp_path / f"{role.name}-store.json").read_text("utf-8"))
            assert stored["master_server_address"].endswith(":50051")
    if form == "slurm":
        nodes = (tmp_path / "nodes").read_text(encoding="utf-8").split()
        assert sorted(nodes) == [f"--nodelist=n{number + 1}" for number in range(len(described.roles))]


def _program(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)


def test_the_shell_form_names_every_toggle() -> None:
    text = printing.shell(topology.load("lmcache"), {"LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS": "a b"})
    assert text.count("export LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS='a b'") == 2
    commands = [line for line in text.splitlines() if line.endswith(" &")]
    assert [shlex.split(line)[0] for line in commands] == ["lmcache", "vllm"]
