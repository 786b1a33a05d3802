"""The bundle's bill of materials, in CycloneDX's form: what it is made of, for who scans images."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

SBOM = "sbom.cdx.json"


def make(version: str, wrapt: str | None, patches: Mapping[str, str], extensions: Mapping[str, bytes]) -> bytes:
    """The document. `wrapt` is its version where the bundle holds it, `extensions` its compiled files; `patches` are
    digests by name (hexadecimal SHA-256).

    The same bytes for the same input: it has no time, and its serial number is made of what it lists.
    """
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    def hashed(sha256: str) -> list[HashType]:
        return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]

    bundle = Component(
        name="vllm-livepatch",
        version=version,
        type=ComponentType.APPLICATION,
        licenses=[DisjunctiveLicense(id="Apache-2.0")],
        purl=PackageURL("pypi", None, "vllm-livepatch", version),
        bom_ref="vllm-livepatch",
    )
    library = wrapt and Component(
        name="wrapt",
        version=wrapt,
        type=ComponentType.LIBRARY,
        licenses=[DisjunctiveLicense(id="BSD-2-Clause")],
        purl=PackageURL("pypi", None, "wrapt", wrapt),
        bom_ref="wrapt",
        components=[
            Component(name=name, type=ComponentType.FILE, bom_ref=name, hashes=hashed(hashlib.sha256(data).hexdigest()))
            for name, data in extensions.items()
        ],
    )
    parts = [
        Component(name=name, group="patch", type=ComponentType.LIBRARY, bom_ref=f"patch/{name}", hashes=hashed(sha256))
        for name, sha256 in patches.items()
    ]
    if library:
        parts.insert(0, library)
    bom = Bom(components=parts)
    bom.metadata.component = bundle
    bom.register_dependency(bundle, parts)
    document: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["metadata"]["timestamp"], document["serialNumber"]
    content = json.dumps(document, sort_keys=True)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
