"""What `deploy ray` prints against KubeRay's own schema. (test_deploy.py has its pods against Kubernetes' own.)

No package index carries that schema, so kuberay.json keeps what concerns us of it, as this makes it of a release's chart:

    python -m tests.unit.test_kuberay VERSION helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from vllm_livepatch.tools import deploy

KEPT = Path(__file__).with_name("kuberay.json")
VERSION = "v1"
DEEP = 4  # spec, a group, its fields and what those hold; below are pods and other things of Kubernetes' own


def kept(schema: Any, deep: int) -> Any:
    """The schema without what it says for people, and open where it goes deeper."""
    if isinstance(schema, list):
        return [kept(part, deep) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: kept(part, deep) for key, part in schema.items() if key not in ("description", "properties")}
    if "properties" in schema and deep:
        new["properties"] = {name: kept(part, deep - 1) for name, part in schema["properties"].items()}
    return new


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


def problems(cluster: Any) -> list[str]:
    schema = strict(json.loads(KEPT.read_text("utf-8"))["schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own
    return sorted({error.json_path for error in jsonschema.Draft7Validator(schema).iter_errors(cluster)})


@pytest.fixture
def cluster() -> Any:
    found = yaml.safe_load(deploy.text("ray", "registry.example.com/vllm:1.0", "org/model"))
    assert found["apiVersion"] == f"ray.io/{VERSION}"
    return copy.deepcopy(found)  # head and workers share their pod


def test_the_cluster_that_is_printed(cluster: Any) -> None:
    assert problems(cluster) == []


def test_the_schema_refuses_what_kuberay_does(cluster: Any) -> None:
    cluster["spec"]["environment"] = []
    cluster["spec"]["headGroupSpec"]["env"] = []
    cluster["spec"]["workerGroupSpecs"][0]["replicas"] = "one"
    del cluster["spec"]["workerGroupSpecs"][0]["groupName"]
    del cluster["spec"]["headGroupSpec"]["template"]
    group = "$.spec.workerGroupSpecs[0]"
    assert problems(cluster) == ["$.spec", "$.spec.headGroupSpec", group, f"{group}.replicas"]


if __name__ == "__main__":
    (printed,) = (
        one["schema"]["openAPIV3Schema"]
        for one in yaml.safe_load(Path(sys.argv[2]).read_text("utf-8"))["spec"]["versions"]
        if one["name"] == VERSION
    )
    text = json.dumps({"kuberay": sys.argv[1], "schema": kept(printed, DEEP)}, indent=1)
    KEPT.write_text(text + "\n", "utf-8")
