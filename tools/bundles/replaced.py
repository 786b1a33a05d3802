"""What `generate` says of the bundle that lay there before: what is new, and which processes have to be restarted."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_livepatch.sitecustomize import report
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import status, summary
from vllm_livepatch.tools.in_bundle.verifying import MANIFEST

_UNPACKED = (RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)  # a zip file that was cut off, or changed
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, *_UNPACKED)
_NAMED = 5


@dataclass(frozen=True)
class Identity:
    """A bundle's version and digest; of each patch its own version, and the digest of its folder."""

    version: str
    digest: str
    versions: Mapping[str, int | None] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)


def lying_at(place: Path) -> Identity | None:
    """The bundle at a place that is about to be written, None where there is none, or one that cannot be read."""
    try:
        if place.is_dir():
            return identity(lambda name: (place / name).read_bytes())
        with zipfile.ZipFile(place) as archive:
            return identity(archive.read)
    except _DAMAGED:
        return None


def identity(read: Callable[[str], bytes]) -> Identity:
    """What a bundle says of itself; `read` gives the content of a file by its path in it. Raises one of `_DAMAGED`."""
    manifest = read(MANIFEST)
    listed = json.loads(manifest)
    digest = "sha256:" + hashlib.sha256(manifest).hexdigest()
    version = str(listed["vllm-livepatch"])
    try:
        found = json.loads(read(f"{listed['generation']}/_vllm_livepatch/catalogue.json"))
        versions = {str(name): facts.get("version") for name, facts in found["patches"].items()}
        return Identity(version, digest, versions, {name: str(one) for name, one in found["digests"].items()})
    except _DAMAGED:  # of version 0.1.0, say
        return Identity(version, digest)


def sentences(before: Identity, files: Mapping[str, bytes], state: Path) -> list[str]:
    """What the bundle of these files has replaced, and what has to be restarted for it to be in use.

    `state` is where processes of this machine leave their reports.
    """
    now = identity(files.__getitem__)
    if now.digest == before.digest:
        return ["the same bundle lay there before: nothing is replaced"]
    found = [f"replaced {before.version}, {before.digest}{_differences(before, now)}"]
    alike = [name for name in _changed(before, now) if before.versions.get(name) == now.versions.get(name)]
    alike = [name for name in alike if name not in catalogue.own()]  # ours: only what it says to people has changed
    if alike:
        more = "`status --require NAME@N` cannot tell the two apart"
        found.append(f"raise `version` in the patch.toml of {', '.join(alike)}: it is that of before, so that {more}")
    running = _running(state, before.digest)
    if running:
        more = f" and {len(running) - _NAMED} more" if len(running) > _NAMED else ""
        found.append(f"restart what runs the one before: {', '.join(running[:_NAMED])}{more}")
    else:
        found.append(f"restart the engines and LMCache servers that run the one before ({state} names none)")
    found.append(f"until then each keeps it: `vllm-livepatch status --digest {now.digest}` exits with 1")
    return found


def _differences(before: Identity, now: Identity) -> str:
    if not before.versions:
        return ""
    parts = {
        "changed": [f"{name} ({_versions(before, now, name)})" for name in _changed(before, now)],
        "new": sorted(now.versions.keys() - before.versions.keys()),
        "gone": sorted(before.versions.keys() - now.versions.keys()),
    }
    said = [f"{word}: {', '.join(names)}" for word, names in parts.items() if names]
    return f"; {'; '.join(said)}" if said else "; its patches are the same"


def _changed(before: Identity, now: Identity) -> list[str]:
    """The patches whose folder is another; none where the one before does not say."""
    return [name for name in sorted(now.folders) if before.folders.get(name, now.folders[name]) != now.folders[name]]


def _versions(before: Identity, now: Identity, name: str) -> str:
    old, new = (str(bundle.versions.get(name) or "no version") for bundle in (before, now))
    return f"{old} to {new}" if old != new else f"still {new}" if new.isdigit() else "with no version"


def _running(state: Path, digest: str) -> list[str]:
    """The live processes that run the bundle of this digest, as far as their reports lie in `state`."""
    try:
        reports = status.read(state)
    except UserError:  # another user's
        return []
    found = [process for process in reports.witnesses if process["digest"] == digest]
    return [f"pid {one['pid']} on {one['host']} ({summary.command_of(one)[:60]})" for one in found]


def state_directory() -> Path:
    """Where processes of this user leave their reports, unless they were told another place."""
    return Path(report.directory(os.environ))
