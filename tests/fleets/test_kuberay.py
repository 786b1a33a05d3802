"""What `deploy ray` prints against KubeRay's own schema, which no package index carries.

`KUBERAY_CRD=ray.io_rayclusters.yaml python -m pytest tests/fleets/test_kuberay.py`, with the file of KubeRay's Helm chart
(helm-chart/kuberay-operator/crds).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from vllm_livepatch.tools import deploy


def strict(schema: Any) -> Any:
    """As the API server takes a manifest with `--validate=strict`: a field that the schema lacks is an error."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: strict(part) for key, part in schema.items()}
    if new.get("x-kubernetes-int-or-string") is True:
        new = {"type": ["integer", "string"]}
    if isinstance(new.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in new:
        new.setdefault("additionalProperties", False)
    return new


@pytest.fixture(scope="module")
def versions() -> dict[str, Any]:
    """Each version's schema, by its name."""
    file = os.environ.get("KUBERAY_CRD")
    if not file:
        pytest.skip("KUBERAY_CRD does not name KubeRay's ray.io_rayclusters.yaml")
    found = {}
    for version in yaml.safe_load(Path(file).read_text("utf-8"))["spec"]["versions"]:
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}  # the API server's own
        found[version["name"]] = schema
    return found


def problems(schema: Any, cluster: Any) -> list[str]:
    return [error.json_path for error in jsonschema.Draft7Validator(schema).iter_errors(cluster)]


def test_the_cluster_that_is_printed(versions: dict[str, Any]) -> None:
    cluster = yaml.safe_load(deploy.text("ray", "registry.example.com/vllm:1.0", "org/model"))
    schema = versions[cluster["apiVersion"].partition("/")[2]]
    assert problems(schema, cluster) == []
    cluster["spec"]["headGroupSpec"]["environment"] = []
    assert problems(schema, cluster) == ["$.spec.headGroupSpec"]
