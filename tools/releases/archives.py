"""The Python files in a whole wheel or source archive, on this machine or downloaded. Nothing of it is executed."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

import requests
from vllm_livepatch.tools.releases import registry, sources
from vllm_livepatch.tools.releases.registry import Wheel
from vllm_livepatch.tools.releases.sources import SourcesError

LARGEST = 32 << 20
"""Bytes; a Python file that says it is larger is none."""

Tell = Callable[[str], None]


def whole(
    wheel: Wheel,
    session: requests.Session,
    tell: Tell,
    unpack: Callable[[Wheel, Path], dict[str, bytes]],
) -> tuple[dict[str, int], dict[str, bytes]]:
    """Download a file, compare it with its digest, and give the checksums and contents of the Python files in it."""
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-livepatch-") as temporary:
            file = Path(temporary, "file")
            with file.open("wb") as opened, sources.reading(wheel):
                digest = _download(wheel, session, opened, tell)
            if wheel.sha256 and digest != wheel.sha256:
                raise SourcesError(f"the registry's {wheel.name} is damaged: its SHA-256 is not what the registry says")
            contents = unpack(wheel, file)
    except OSError as error:
        raise SourcesError(f"cannot keep {wheel.name} below {tempfile.gettempdir()}: {error.strerror}") from error
    return {name: zlib.crc32(content) for name, content in contents.items()}, contents


def _download(wheel: Wheel, session: requests.Session, opened: IO[bytes], tell: Tell) -> str:
    digest = hashlib.sha256()
    with session.get(wheel.url, stream=True, timeout=registry.TIMEOUT) as answer:
        answer.raise_for_status()
        size = answer.headers.get("Content-Length")
        if size is not None:
            tell(f"reading {wheel.name}, {int(size) / 1e6:.1f} MB")
        for part in iter(lambda: answer.raw.read(1 << 20), b""):
            opened.write(part)
            digest.update(part)
    if size is not None and opened.tell() != int(size):
        raise SourcesError(f"the registry's {wheel.name} broke off after {opened.tell()} of {size} bytes")
    return digest.hexdigest()


def of_wheel(wheel: Wheel, file: Path) -> dict[str, bytes]:
    with opened(file, f"the registry's {wheel.name}") as archive:
        return {name: member(archive, name) for name in archive.namelist() if is_python(name)}


def of_source_archive(wheel: Wheel, file: Path) -> dict[str, bytes]:
    """The packages of a source archive by their paths in a wheel: below its one folder, or `src` in it."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(file) as archive:
            for member in archive:
                name = member.name.partition("/")[2].removeprefix("src/")
                if member.isfile() and is_python(name) and member.size <= LARGEST:
                    content = archive.extractfile(member)
                    found[name] = content.read() if content is not None else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise SourcesError(f"the registry's {wheel.name} is damaged: {error}") from error
    return found


class opened:
    """A wheel on this machine, open; what is wrong with it becomes SourcesError."""

    def __init__(self, file: Path, called: str) -> None:
        self._file, self._called = file, called

    def __enter__(self) -> zipfile.ZipFile:
        try:
            self._archive = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, ValueError) as error:
            raise SourcesError(f"{self._called} is damaged: {error}") from error
        except OSError as error:
            raise SourcesError(f"{self._called} cannot be read: {error.strerror or error}") from error
        return self._archive

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._archive.close()
        if isinstance(error, (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError)):
            raise SourcesError(f"{self._called} is damaged: {error}") from error


def member(archive: zipfile.ZipFile, name: str) -> bytes:
    check_size(archive.getinfo(name), archive.filename or "the wheel")
    return archive.read(name)


def check_size(info: zipfile.ZipInfo, called: str) -> None:
    if info.file_size > LARGEST:
        raise SourcesError(f"{called}: {info.filename} is no Python file of {info.file_size} bytes")


def is_python(name: str) -> bool:
    top, slash, _ = name.partition("/")
    return bool(slash) and name.endswith(".py") and top.isidentifier()
