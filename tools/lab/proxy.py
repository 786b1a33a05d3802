"""Upstream's example proxy for Mooncake, which asks prefill and decode at once. vllm-router asks one after the other.

It is in vLLM's source archives and in no wheel: one file of one release, fetched once, and never changed.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path

import requests
from vllm_livepatch.tools import user_cache
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.releases import registry

ARCHIVE = "vllm-0.32.0.tar.gz"
MEMBER = "vllm-0.32.0/examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py"
SHA256 = "c3c8c8fb96e7f805bb9c2cef36391b1b1c0dcbd296d7d3156bc4b9dd4dfe9e41"
"""Of the file, not of the archive, of which no more is read than what stands before it: 1 of 45 MB."""


def place() -> Path:
    """Where the proxy is once it was fetched."""
    return user_cache.directory() / "proxies" / f"{SHA256[:12]}.py"


def fetch() -> None:
    """Fetch it if it is not there. Raises InstallationError."""
    if place().is_file():
        return
    try:
        (archive,) = [file for file in registry.files("vllm") if file.filename == ARCHIVE]
        with registry.new_session() as session, session.get(archive.url, stream=True, timeout=registry.TIMEOUT) as got:
            got.raise_for_status()
            content = member(got)
    except (OSError, ValueError, tarfile.TarError, requests.RequestException, registry.RegistryError) as error:
        raise environments.InstallationError(f"upstream's proxy cannot be fetched from {ARCHIVE}: {error}") from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise environments.InstallationError(f"{MEMBER} is not the pinned file")
    place().parent.mkdir(parents=True, exist_ok=True)
    new = place().with_suffix(f".{os.getpid()}")
    new.write_bytes(content)
    new.replace(place())


def member(answer: requests.Response) -> bytes:
    """The proxy's bytes from an archive that is read as far as that. Raises ValueError where it has none."""
    with tarfile.open(fileobj=answer.raw, mode="r|gz") as archive:
        for entry in archive:
            if entry.name == MEMBER and (file := archive.extractfile(entry)) is not None:
                return file.read()
    raise ValueError(f"it has no {MEMBER}")
