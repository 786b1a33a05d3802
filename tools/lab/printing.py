"""The commands of a topology on a real cluster: a part a node, the bundle mounted read-only, health checks in place.

What is printed is meant to be read and adapted: images, model, volumes and node names are the reader's own.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import yaml
from vllm_livepatch.tools.lab import topology
from vllm_livepatch.tools.lab.topology import PORTS, Placement, Role, Topology

BUNDLE = "/opt/livepatch"
"""Where the bundle is mounted on each node."""
MODEL = "/models/model"
CLAIMS = {"livepatch": BUNDLE, "models": "/models"}
"""Volumes that every node has, by name."""


def cluster(described: Topology, host: Callable[[str], str]) -> Placement:
    """Each part on a machine of its own, called ``host(part)``, on the usual ports, with KV in device memory."""
    ports = {role.name: PORTS[role.kind] for role in described.roles}
    return Placement({role.name: host(role.name) for role in described.roles}, ports, "cuda", described.settings)


def variables(role: Role, placement: Placement, toggles: dict[str, str]) -> dict[str, str]:
    """A part's environment on a cluster. The router is no Python process that a patch concerns."""
    own = topology.own_environment(role, placement)
    if role.kind in topology.UNPATCHED:
        return own
    return {**own, "PYTHONPATH": BUNDLE, "LIVEPATCH": "strict", **toggles}


def shell(described: Topology, toggles: dict[str, str]) -> str:
    """Commands by node, in the order in which to start them, each with the wait for its health."""
    placement = cluster(described, lambda name: f"{name}-node")
    lines = [f"# {described.name}: {described.title}"]
    lines += [f"# The bundle (vllm-livepatch generate --out DIR) lies at {BUNDLE} on every node, read-only."]
    for role in described.roles:
        lines += ["", f"# on {placement.hosts[role.name]}" + (", together with the part before" if role.beside else "")]
        exported = variables(role, placement, toggles)
        lines += [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
        lines.append(f"{shlex.join(topology.command(role, placement, MODEL, '0.0.0.0'))} &")
        lines.append(_wait(role, placement))
    lines += ["", f"# clients ask http://{placement.hosts[described.ask]}:{placement.ports[described.ask]['http']}"]
    return "\n".join(lines) + "\n"


def slurm(described: Topology, toggles: dict[str, str]) -> str:
    """A batch script: as many nodes as parts; the whole ends with the first part that does."""
    placement = cluster(described, lambda name: f"${{{name}}}")
    count = len(described.roles)
    lines = ["#!/usr/bin/env bash", f"#SBATCH --job-name={described.name}", f"#SBATCH --nodes={count}"]
    lines += ["#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive", "set -euo pipefail", ""]
    lines += ['mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")']
    lines += [f"{role.name}=${{nodes[{number}]}}" for number, role in enumerate(described.roles)]
    lines += ["trap 'kill $(jobs -p) 2>/dev/null' EXIT", ""]
    for role in described.roles:
        exported = ["env", *(f"{name}={value}" for name, value in variables(role, placement, toggles).items())]
        words = [*exported, *topology.command(role, placement, MODEL, "0.0.0.0")]
        lines.append(f'srun --nodes=1 --ntasks=1 --nodelist="${role.name}" {_joined(words)} &')
        lines += [_wait(role, placement), ""]
    lines += ["wait -n  # a part has ended: so does the job"]
    return "\n".join(lines) + "\n"


def kubernetes(described: Topology, toggles: dict[str, str]) -> str:
    """A Deployment and a Service for each part, none two on one node."""
    placement = cluster(described, lambda name: f"{described.name}-{name}")
    documents: list[dict[str, Any]] = []
    for role in described.roles:
        documents += [_deployment(described, role, placement, toggles), _service(described, role, placement)]
    text: str = yaml.safe_dump_all(json.loads(json.dumps(documents)), sort_keys=False)  # (copied: no YAML anchors)
    return text


FORMS: dict[str, Callable[[Topology, dict[str, str]], str]] = {
    "kubernetes": kubernetes,
    "shell": shell,
    "slurm": slurm,
}


def _wait(role: Role, placement: Placement) -> str:
    return f'until curl -sf -o /dev/null "{topology.health(role, placement)}"; do sleep 1; done'


def _joined(words: list[str]) -> str:
    """Words for a shell that expands `${PART}` in them, and nothing else."""
    special = str.maketrans({"\\": "\\\\", '"': '\\"', "`": "\\`"})
    return " ".join(f'"{word.translate(special)}"' if "${" in word else shlex.quote(word) for word in words)


def _deployment(described: Topology, role: Role, placement: Placement, toggles: dict[str, str]) -> dict[str, Any]:
    labels = {"app": placement.hosts[role.name], "topology": described.name}
    port = placement.ports[role.name]["http"]
    probe = {"httpGet": {"path": topology.HEALTH[role.kind], "port": port}, "periodSeconds": 5}
    exported = variables(role, placement, toggles)
    volumes = [name for name in CLAIMS if role.kind == "engine" or (name == "livepatch" and role.kind == "lmcache")]
    container: dict[str, Any] = {
        "name": role.name,
        "image": "vllm-router:latest" if role.kind == "router" else "vllm-lmcache:latest",
        "command": topology.command(role, placement, MODEL, "0.0.0.0"),
        "env": [_variable(name, value, placement.hosts[role.name]) for name, value in exported.items()],
        "ports": [{"name": name, "containerPort": number} for name, number in placement.ports[role.name].items()],
        "startupProbe": {**probe, "failureThreshold": 240},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
        "volumeMounts": [{"name": name, "mountPath": CLAIMS[name], "readOnly": True} for name in volumes],
    }
    if role.kind == "engine":
        container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    others = {
        "labelSelector": {"matchLabels": {"topology": described.name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [others]}}
    claimed = [{"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}} for name in volumes]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": placement.hosts[role.name], "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"affinity": affinity, "containers": [container], "volumes": claimed},
            },
        },
    }


def _variable(name: str, value: str, own_host: str) -> dict[str, Any]:
    """A variable; where a part is to listen on its own address, that is its pod's, not its service's name."""
    if value == own_host:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {"name": name, "value": value}


def _service(described: Topology, role: Role, placement: Placement) -> dict[str, Any]:
    name = placement.hosts[role.name]
    ports = [{"name": port, "port": number} for port, number in placement.ports[role.name].items()]
    labels = {"app": name, "topology": described.name}
    # No cluster address of its own: NIXL and Mooncake connect to the peer itself.
    spec = {"clusterIP": "None", "selector": labels, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels}, "spec": spec}
