"""The bundle: written whole or not at all, and the same bytes for the same input."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import wrapt
from vllm_livepatch import sitecustomize
from vllm_livepatch.tools import bundled
from vllm_livepatch.tools.bundled.verifying import MANIFEST as MANIFEST
from vllm_livepatch.tools.bundled.verifying import differences as differences
from vllm_livepatch.tools.catalogue import Entry
from vllm_livepatch.tools.errors import UserError

PACKAGE = "_vllm_livepatch"
_TARGETS, _FINDING = "\nTARGETS = {}  #", '\nFINDING = ""  #'


def version() -> str:
    return metadata.version("vllm-livepatch")


def contents(entries: Mapping[str, Entry]) -> dict[str, bytes]:
    """Every file of the bundle by its path in it, `manifest.json` included."""
    runtime = Path(next(iter(sitecustomize.__path__)))
    files: dict[str, bytes] = {}
    entry, finding = ((runtime / name).read_text("utf-8") for name in ("entry.py", "finding.py"))
    if entry.count(_TARGETS) != 1 or entry.count(_FINDING) != 1 or "'''" in finding or not finding.isascii():
        raise AssertionError("entry.py has no place for the targets and for finding.py")
    targets = json.dumps(_targets(entries), sort_keys=True)
    entry = entry.replace(_TARGETS, f"\nTARGETS = {targets}  #")
    files["sitecustomize.py"] = entry.replace(_FINDING, f"\nFINDING = r'''{finding}'''  #").encode()
    for source in sorted(runtime.glob("*.py")):
        if source.name not in ("entry.py", "finding.py"):
            files[f"{PACKAGE}/sitecustomize/{source.name}"] = source.read_bytes()
    answering = Path(next(iter(bundled.__path__)))
    files["__main__.py"] = (answering / "main.py").read_bytes()
    for source in (answering.parent / "errors.py", *sorted(answering.glob("*.py"))):
        if source.name != "main.py":
            files[f"{PACKAGE}/tools/{source.relative_to(answering.parent).as_posix()}"] = source.read_bytes()
    for folder in ("", "patches/", "tools/", "vendor/"):
        files[f"{PACKAGE}/{folder}__init__.py"] = b""
    for item in entries.values():
        place = f"{PACKAGE}/patches/{item.folder.name}"
        files[f"{place}/__init__.py"] = b""
        for source in sorted(item.folder.rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts and source.name != "patch.toml":
                files[f"{place}/{source.relative_to(item.folder).as_posix()}"] = source.read_bytes()
    # The compiled part serves the interpreter that its file name says; on another one wrapt does without.
    for source in sorted(Path(wrapt.__file__).parent.iterdir()):
        if source.suffix == ".py" or (source.suffix == ".so" and "." in source.stem):
            files[f"{PACKAGE}/vendor/wrapt/{source.name}"] = source.read_bytes()
    for licence in metadata.files("wrapt") or []:
        if licence.name == "LICENSE":
            files[f"{PACKAGE}/vendor/wrapt/LICENSE"] = Path(str(licence.locate())).read_bytes()
    catalogue = {
        "version": version(),
        "patches": {name: item.facts for name, item in sorted(entries.items())},
        "digests": {name: _digest(item.folder) for name, item in sorted(entries.items())},
        "changes": {
            name: [change.to_json() for change in item.changes()]
            for name, item in sorted(entries.items())
            if item.patch.diff
        },
    }
    files[f"{PACKAGE}/catalogue.json"] = _json(catalogue)
    files[MANIFEST] = _json(
        {
            "vllm-livepatch": version(),
            "wrapt": metadata.version("wrapt"),
            "python": ">=3.10,<3.15",
            "patches": sorted(entries),
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
        }
    )
    return files


def _targets(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Each module that a patch names, and what is done to it, in the entry's words."""
    targets = {name: "wrapped" for item in entries.values() for name in item.patch.modules}
    for item in entries.values():
        for change in item.changes() if item.patch.diff else ():
            added = "added package" if change.package else "added"
            targets[change.module] = added if change.added else "changed"
    return targets


def write_directory(files: Mapping[str, bytes], out: Path) -> None:
    """Write the bundle beside `out` and move it there. An older bundle is replaced; anything else is left alone."""
    _usable(out)
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / MANIFEST).is_file())):
        raise UserError(f"{out} exists and is not a bundle: name a new directory")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            new = Path(temporary, "new")
            for name, data in files.items():
                file = new / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            os.chmod(new, 0o755)
            if out.exists():
                out.rename(Path(temporary, "old"))
            new.rename(out)
    except OSError as error:
        raise UserError(f"the bundle cannot be written to {out}: {error.strerror or error}") from error


def write_zip(files: Mapping[str, bytes], out: Path) -> None:
    """The same as one file, which goes on PYTHONPATH as it is."""
    _usable(out)
    if out.is_dir() or (out.exists() and not zipfile.is_zipfile(out)):
        raise UserError(f"{out} exists and is not a zip file: name a new one")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            new = Path(temporary, "new.zip")
            with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, data in sorted(files.items()):
                    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                    info.external_attr = 0o644 << 16
                    # What every process reads at its start is not worth unpacking; the rest is read by few.
                    packed = zipfile.ZIP_STORED if name == "sitecustomize.py" else zipfile.ZIP_DEFLATED
                    archive.writestr(info, data, packed)
            new.replace(out)
    except OSError as error:
        raise UserError(f"the bundle cannot be written to {out}: {error.strerror or error}") from error


def cached(files: Mapping[str, bytes]) -> Path:
    """A directory that holds this bundle, in the user's cache (or a temporary place where that cannot be written)."""
    name = hashlib.sha256(files[MANIFEST]).hexdigest()[:16]
    for place in (cache_directory() / "bundles", Path(tempfile.gettempdir(), f"vllm-livepatch-{os.getuid()}-bundles")):
        out = place / name
        try:
            if out.is_dir() and not differences(out)[0]:
                return out
            shutil.rmtree(out, ignore_errors=True)
            write_directory(files, out)
        except UserError:
            continue
        return out
    raise UserError("neither the user's cache nor the temporary directory can be written")


def cache_directory() -> Path:
    """The user's cache directory for this project."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "vllm-livepatch"


def _digest(folder: Path) -> str:
    """What a patch folder holds, its bytecode left out."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    digests = (f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _usable(out: Path) -> None:
    if os.pathsep in str(out.absolute()):
        raise UserError(f"{out} has a {os.pathsep!r} in it, so that PYTHONPATH cannot name it")


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
