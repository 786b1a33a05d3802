"""The file that `prove --out` writes and `generate --proofs` reads: what each patch's proof came to, on which code.

It is a trusted input of whoever makes a bundle, as a directory of patches is. It holds no date: the same proofs make
the same bundle.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize.decision import PatchError
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools.bundles import bundle
from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.errors import UserError

FORMAT = 1
DECIDES = ("proven", "no-fault", "failed")
"""Outcomes that say something of the code that they are of."""


def usable(file: Path) -> None:
    """Raises UserError where nothing can be written at a file's place: before minutes of work are lost for it."""
    why = ""
    if file.exists() and not file.is_file():  # a device, a pipe: a file would be put in its place
        why = "it is a directory" if file.is_dir() else "it is no regular file"
    elif not (place := _place(file).parent).is_dir() or not os.access(place, os.W_OK):
        why = "its directory is not there, or not yours"
    if why:
        raise UserError(f"{file} cannot be written: {why}")


def _place(file: Path) -> Path:
    """Where a file is, or is to be: a link stays one."""
    return Path(os.path.realpath(file))


def write(file: Path, packages: Mapping[str, str | None], outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep what came of each patch. Raises UserError where nothing can be written there."""
    content = {"format": FORMAT, "vllm-livepatch": bundle.version(), "packages": packages, "patches": outcomes}
    place = _place(file)
    new = place.with_name(f".{place.name[:200]}.new-{os.getpid()}")
    try:
        new.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
        new.replace(place)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise UserError(f"{file} cannot be written: {error.strerror}") from error


def with_proofs(entries: Mapping[str, Entry], file: Path) -> dict[str, Entry]:
    """The entries, with what the file says of them. Raises UserError, also for a proof of another form of a patch."""
    found = dict(entries)
    for name, outcome in _read(file).items():
        if name not in found or outcome.get("outcome") not in DECIDES:
            continue
        entry = found[name]
        if outcome.get("digest") != bundle.digest_of(entry.folder):
            raise UserError(f"{file}: {name} has changed since it was proven: run prove again")
        kept = {key: outcome.get(key, default) for key, default in _KEPT.items()}
        others = [proof for proof in entry.facts.get("proof", []) if proof.get("code") != kept["code"]]  # a bundle's
        facts = {**entry.facts, "proof": [*others, kept]}
        try:
            found[name] = replace(entry, facts=facts, patch=to_patch(name, facts))
        except (PatchError, TypeError, ValueError) as error:
            raise UserError(f"{file}: {error}") from error
    return found


_KEPT: dict[str, Any] = {"code": {}, "outcome": "", "facts": {}, "detail": ""}
"""Entries of an outcome that the decision needs, with what stands for one that is missing."""


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not what prove --out writes: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("patches"), dict):
        raise UserError(f"{file} is not what prove --out writes")
    if content.get("format") != FORMAT:
        raise UserError(f"{file} has format {content.get('format')!r}: this version knows {FORMAT}")
    patches: dict[str, Any] = content["patches"]
    if not all(isinstance(outcome, dict) for outcome in patches.values()):
        raise UserError(f"{file} is not what prove --out writes")
    return patches
