"""A bundle put where processes may be starting with the one that lies there: each sees the whole old or the whole new.

The directory itself stays (a container's bind mount holds on to it), and so does the folder of the bundle that is
replaced: the new one's lies beside it, under a name of its own, before the entry that names it is replaced in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.verifying import GENERATION, MANIFEST

ENTRY = "sitecustomize.py"
KEPT_SECONDS = 3600.0
"""How long the folder of a replaced bundle stays, at least: processes that began with it may import from it."""
_NEW = ".new-"


def write_directory(files: Mapping[str, bytes], out: Path) -> None:
    """Put a bundle at `out`. An older bundle there is replaced; anything else is left alone."""
    _usable(out)
    other = f"{out} exists and is not a bundle: name a new directory"
    fresh = not out.exists()
    if not (fresh or out.is_dir()):
        raise UserError(other)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            if any(out.iterdir()) and not _is_bundle(out):
                raise UserError(other)
            try:
                _place(files, out)
            except BaseException:
                _tidy(out, fresh)
                raise
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
                    packed = zipfile.ZIP_STORED if name == ENTRY else zipfile.ZIP_DEFLATED
                    archive.writestr(info, data, packed)
            new.chmod(0o644)
            new.replace(out)
    except OSError as error:
        raise UserError(f"the bundle cannot be written to {out}: {error.strerror or error}") from error


def _place(files: Mapping[str, bytes], out: Path) -> None:
    out.chmod(0o755)
    for left in out.glob(f"{_NEW}*"):  # of one that was killed
        _remove(left)
    _keep_version_0_1(out)
    generation = str(json.loads(files[MANIFEST])["generation"])
    # Written in full before anything is replaced: from then on no disk can be too small.
    at_top = sorted((name for name in files if "/" not in name), key=lambda name: (name == ENTRY, name))
    written = {name: _written(out / name, files[name]) for name in at_top}
    _place_generation(files, out, generation)
    for name, new in written.items():
        if new is not None:
            os.replace(new, out / name)
            if name == ENTRY:
                os.utime(out / generation)  # since when it is in use: it was then that the one before was replaced
    _remove_old(files, out, generation)


def _place_generation(files: Mapping[str, bytes], out: Path, generation: str) -> None:
    own = {name: data for name, data in files.items() if name.startswith(f"{generation}/")}
    for link in [found for found in (out / generation, *(out / generation).rglob("*")) if found.is_symlink()]:
        link.unlink()  # nothing is written to where it leads
    if (out / generation).is_dir():  # it was here before: what is damaged of it is mended, file by file
        for name, data in own.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            _replace(out / name, data)
        for file in [file for file in (out / generation).rglob("*") if not file.is_dir()]:
            if file.relative_to(out).as_posix() not in own:  # bytecode, too: nobody knows whose it is
                file.unlink(missing_ok=True)
    else:
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=out))
        for name, data in own.items():
            file = new / name.partition("/")[2]
            file.parent.mkdir(parents=True, exist_ok=True)
            _replace(file, data)
        _open_folders(new)
        new.rename(out / generation)
        return
    _open_folders(out / generation)


def _replace(file: Path, data: bytes) -> None:
    new = _written(file, data)
    if new is not None:
        os.replace(new, file)


def _written(file: Path, data: bytes) -> Path | None:
    """A file beside `file` that is to take its place in one step, readable by everybody; None where that need not be.

    What replaces another is a second younger at least: Python takes cached bytecode for a source's by the source's
    seconds and size, and both may be the same.
    """
    before = 0
    with contextlib.suppress(OSError):
        before = int(file.stat().st_mtime)
        if not file.is_symlink() and file.read_bytes() == data:
            file.chmod(0o644)
            return None
    opened, name = tempfile.mkstemp(prefix=_NEW, dir=file.parent)
    with open(opened, "wb") as stream:
        stream.write(data)
        os.fchmod(opened, 0o644)
    if before >= int(os.stat(name).st_mtime):
        os.utime(name, (time.time(), before + 1))
    return Path(name)


def _remove_old(files: Mapping[str, bytes], out: Path, generation: str) -> None:
    """What is not the bundle's, and the folders of earlier ones that were replaced long enough ago."""
    own = {name.partition("/")[0] for name in files}
    earlier = [folder for folder in out.iterdir() if GENERATION.fullmatch(folder.name) and folder.is_dir()]
    replaced = (out / generation).stat().st_mtime
    for folder in sorted(earlier, key=lambda folder: folder.stat().st_mtime, reverse=True):
        if folder.name == generation:
            continue
        if time.time() - replaced < KEPT_SECONDS:
            own.add(folder.name)
        replaced = folder.stat().st_mtime
    for found in list(out.iterdir()):
        if found.name == "__pycache__" and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)  # somebody who starts may be writing there
        elif found.name not in own:
            _remove(found)


def _keep_version_0_1(out: Path) -> None:
    """A bundle of version 0.1 has no generation: what it has is kept as one, with its manifest, as later ones are."""
    package = out / "_vllm_livepatch"
    with contextlib.suppress(FileNotFoundError):
        manifest = (out / MANIFEST).read_bytes()
        if package.is_dir() and not (package / MANIFEST).exists():
            _replace(package / MANIFEST, manifest)


def _tidy(out: Path, fresh: bool) -> None:
    """After a failure: nothing half-written stays. What the entry names is whole."""
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
    with contextlib.suppress(OSError):
        for left in out.rglob(f"{_NEW}*"):
            _remove(left)


def _remove(found: Path) -> None:
    if found.is_dir() and not found.is_symlink():
        shutil.rmtree(found)
    else:
        found.unlink()


def _open_folders(place: Path) -> None:
    for folder in (place, *place.rglob("*")):
        if folder.is_dir():
            folder.chmod(0o755)


def _is_bundle(place: Path) -> bool:
    """By its manifest; or, where that is damaged, by its entry."""
    try:
        if "vllm-livepatch" in json.loads((place / MANIFEST).read_bytes()):
            return True
    except (OSError, ValueError, TypeError):
        pass
    try:
        return b"vllm-livepatch bundle" in (place / ENTRY).read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """One writer at a time, where the file system can lock."""
    opened = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _usable(out: Path) -> None:
    if os.pathsep in str(out.absolute()):
        raise UserError(f"{out} has a {os.pathsep!r} in it, so that PYTHONPATH cannot name it")
