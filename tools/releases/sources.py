"""The Python sources of a published release, without downloading its wheel.

A vLLM wheel is 300 to 500 MB of compiled kernels around 4 to 12 MB (compressed) of Python. Only the latter
is read, by HTTP byte ranges, and kept in the user's cache as `<package>-<version>-<wheel's SHA-256, 12
digits>`, a directory that can be put on PYTHONPATH. A range read cannot be checked against the wheel's
digest, so a pinned release carries a digest of its own over the sources.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import requests
from remotezip import (
    PartialBuffer,
    RangeNotSupported,
    RemoteFetcher,
    RemoteIOError,
    RemoteZip,
    RemoteZipError,
)
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from urllib3.exceptions import HTTPError
from vllm_livepatch.tools import threads, user_cache
from vllm_livepatch.tools.releases import registry
from vllm_livepatch.tools.releases.registry import RegistryError, Wheel

METADATA = ("METADATA", "RECORD", "entry_points.txt")
"""What is kept of `*.dist-info`, so that `importlib.metadata` can say what the directory holds."""

MERGE_GAP = 128 * 1024
"""Bytes of unwanted data worth reading to save a request: about what a round trip costs."""

DIRECTORY_GUESS = 768 * 1024
"""Bytes to read from a wheel's end at once: enough for the member list of every release so far."""

SPANS_AT_ONCE = 8
"""Parts of a wheel that are fetched at the same time."""

Advance = Callable[[int], None]


class SourcesError(Exception):
    """A release's sources cannot be had; the message is one line for people."""


class RangesRefusedError(SourcesError):
    """The server, or something on the way to it, serves files only whole."""


def site_packages(package: str, version: str) -> Path:
    """Return a directory holding the `.py` files of `package` as published in `version`, fetched if need be.

    Safe to call from several processes at once; what is there is complete. Raises SourcesError, also for
    what the registry cannot give (RegistryError) and for sources that are not the pinned ones.
    """
    pinned = registry.pin(package, version)
    if pinned is not None:
        directory = _directory(package, version, pinned.sha256)
        if directory.is_dir():
            return directory
    try:
        with registry.new_session() as session:
            wheel = registry.find_wheel(package, version, session)
            directory = _directory(package, version, wheel.sha256)
            if not directory.is_dir():
                _fetch(wheel, directory, session, (pinned.sources_sha256 or None) if pinned else None)
    except RegistryError as error:
        raise SourcesError(str(error)) from error
    return directory


def cached(package: str, version: str) -> Path | None:
    """Return where the sources of a pinned release are, None where they were never fetched, or it is not pinned."""
    pinned = registry.pin(package, version)
    directory = _directory(package, pinned.version, pinned.sha256) if pinned is not None else None
    return directory if directory is not None and directory.is_dir() else None


def read_members(wheel: Wheel, names: Collection[str]) -> dict[str, bytes]:
    """Return the contents of those `names` (paths within the wheel) that it has, reading nothing else.

    Raises SourcesError where the wheel cannot be read or is damaged.
    """
    with registry.new_session() as session, opened(wheel, session) as (archive, fetcher):
        return dict(read(archive, fetcher, [i for i in archive.infolist() if i.filename in names]))


def sources_digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Return the SHA-256 (hexadecimal) over names and bytes of the Python files among `files`, by name."""
    digest = hashlib.sha256()
    for name, content in sorted(files):
        if name.endswith(".py"):
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def pin_table(package: str, version: str) -> str:
    """Return the lines that pin a release in `releases.toml`, from the registry as it answers now."""
    with registry.new_session() as session:
        wheel = registry.find_wheel(package, version, session)
        with opened(wheel, session) as (archive, fetcher):
            digest = sources_digest(read(archive, fetcher, _python_members(archive, package)))
    values = {"version": version, "wheel": wheel.name, "sha256": wheel.sha256, "sources_sha256": digest}
    return "\n".join([f"[[{package}]]", *(f'{key} = "{value}"' for key, value in values.items()), ""])


def cache_directory() -> Path:
    """Return where fetched sources are kept, existing or not: below the user's cache directory."""
    return user_cache.directory() / "sources"


def _directory(package: str, version: str, wheel_sha256: str) -> Path:
    return cache_directory() / f"{package}-{version}-{wheel_sha256[:12]}"


def _fetch(wheel: Wheel, directory: Path, session: requests.Session, expected: str | None) -> None:
    """Fill `directory` with the wheel's sources, or leave no trace of it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # In the same parent, so that the final rename is one step on one file system.
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise SourcesError(f"cannot write {directory.parent}: {error.strerror}") from error
    try:
        with opened(wheel, session) as (archive, fetcher):
            members = _python_members(archive, wheel.package)
            with _display.showing(f"the sources of {wheel.package} {wheel.version}", members) as advance:
                files = dict(read(archive, fetcher, members, advance))
        if expected is not None and sources_digest(files.items()) != expected:
            raise SourcesError(f"{wheel.name}: the Python sources in it are not the pinned ones")
        for name, content in files.items():
            path = temporary / safe(name, wheel)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        temporary.chmod(0o755)
        _publish(temporary, directory)
    except OSError as error:
        raise SourcesError(f"cannot write {directory.parent}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, directory: Path) -> None:
    try:
        temporary.rename(directory)
    except OSError:
        # Another process may have put the same sources there meanwhile: then they serve as well.
        if not directory.is_dir():
            raise


def safe(name: str, wheel: Wheel) -> PurePosixPath:
    """Return a member's path if it stays in the directory it is unpacked to. Raises SourcesError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise SourcesError(f"{wheel.name}: refusing a member that leaves the wheel's directory: {name}")
    return path


def _python_members(archive: zipfile.ZipFile, package: str) -> list[zipfile.ZipInfo]:
    def wanted(name: str) -> bool:
        top, _, rest = name.partition("/")
        return (top == package and name.endswith(".py")) or (top.endswith(".dist-info") and rest in METADATA)

    return [info for info in archive.infolist() if wanted(info.filename)]


@contextmanager
def opened(wheel: Wheel, session: requests.Session) -> Iterator[tuple[zipfile.ZipFile, SpanFetcher]]:
    """Open a published wheel; what goes wrong meanwhile at the far end becomes SourcesError."""
    with reading(wheel):
        archive, fetcher = open_wheel(wheel, session)
        with archive:
            yield archive, fetcher


def open_wheel(wheel: Wheel, session: requests.Session) -> tuple[zipfile.ZipFile, SpanFetcher]:
    """Read a wheel's list of members, and leave it open; to be called within `reading`."""
    fetcher = SpanFetcher(wheel.url, session, timeout=registry.TIMEOUT)
    # The list is as long as the files are many, and so not longer than a hundredth of a wheel.
    guess = DIRECTORY_GUESS if wheel.size is None else min(DIRECTORY_GUESS, max(4096, wheel.size // 100))
    return RemoteZip(wheel.url, guess, session, lambda *_, **__: fetcher), fetcher


@contextmanager
def reading(wheel: Wheel) -> Iterator[None]:
    """Make a SourcesError of whatever goes wrong while a wheel is read over the network."""
    try:
        yield
    except (RemoteZipError, requests.RequestException) as error:
        failure = RangesRefusedError if _are_ranges_refused(error) else SourcesError
        raise failure(f"the registry's {wheel.name}{registry.at(wheel.url)} {_what_happened(error)}") from error
    except HTTPError as error:
        raise SourcesError(f"the registry's {wheel.name} broke off in the middle of a part") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise SourcesError(f"the registry's {wheel.name} is damaged: {error}") from error


def _are_ranges_refused(error: Exception) -> bool:
    cause = error.__context__ if isinstance(error, RemoteIOError) else error
    if isinstance(cause, requests.HTTPError) and cause.response is not None:
        return cause.response.status_code in (416, 501)
    return isinstance(cause, RangeNotSupported)


def _what_happened(error: Exception) -> str:
    # The library makes a text of network errors, with the address in it; the error itself says more.
    cause = error.__context__ if isinstance(error, RemoteIOError) else error
    if isinstance(cause, requests.RequestException):
        return registry.what_happened(cause)
    if isinstance(cause, RangeNotSupported):
        return "cannot be read in parts: byte ranges are not served"
    return f"cannot be read in parts: {error}"


def read(
    archive: zipfile.ZipFile,
    fetcher: SpanFetcher,
    members: Collection[zipfile.ZipInfo],
    advance: Advance = lambda size: None,
    gap: int = MERGE_GAP,
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each member; the archive checks their CRC.

    Neighbours with no more than `gap` bytes between them are fetched together.
    """
    starts = sorted(info.header_offset for info in archive.infolist())
    after = dict(zip(starts, [*starts[1:], archive.start_dir], strict=True))
    ordered = sorted(members, key=lambda info: info.header_offset)
    spans: list[tuple[int, int]] = []
    for info in ordered:
        start, end = info.header_offset, after[info.header_offset]
        if spans and start - spans[-1][1] <= gap:
            start = spans.pop()[0]
        spans.append((start, end))
    loaded = zip(list(spans), threads.each(lambda span: fetcher.span(*span), spans, SPANS_AT_ONCE), strict=True)
    for info in ordered:
        while not fetcher.holds(info.header_offset):
            (start, _), data = next(loaded)
            fetcher.hold(start, data)
        yield info.filename, archive.read(info)
        advance(info.compress_size)


class SpanFetcher(RemoteFetcher):  # type: ignore[misc]
    """Answers reads within the last span loaded from memory, and all others over the network."""

    def __init__(self, url: str, session: requests.Session, **options: object) -> None:
        super().__init__(url, session, **options)
        self._start = 0
        self._data = b""

    def span(self, start: int, end: int) -> bytes:
        """Fetch the bytes from `start` up to, not including, `end`."""
        data = bytes(super().fetch((start, end - 1)).read())
        if len(data) != end - start:
            raise RemoteZipError(f"asked for {end - start} bytes, got {len(data)}")
        return data

    def hold(self, start: int, data: bytes) -> None:
        """Answer from `data`, which begins at `start`, from now on."""
        self._start, self._data = start, data

    def holds(self, position: int) -> bool:
        return self._start <= position < self._start + len(self._data)

    def fetch(self, data_range: tuple[int, int | None], stream: bool = False) -> PartialBuffer:
        start, last = data_range
        if last is not None and self._start <= start and last < self._start + len(self._data):
            part = self._data[start - self._start : last + 1 - self._start]
            return PartialBuffer(io.BytesIO(part), start, len(part), stream=False)
        return super().fetch(data_range, stream)


class _Display:
    """The progress on stderr: a bar for each release being fetched in a terminal, elsewhere a line for each.

    Threads share it, since a terminal has room for one display only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: Progress | None = None

    @contextmanager
    def showing(self, what: str, members: Collection[zipfile.ZipInfo]) -> Iterator[Advance]:
        total = sum(info.compress_size for info in members)
        if not sys.stderr.isatty():
            print(f"fetching {what}: {len(members)} files, {total / 1e6:.1f} MB", file=sys.stderr, flush=True)
            yield lambda size: None
            return
        with self._lock:
            bars = self._bars
            if bars is None:
                columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
                bars = self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
                bars.start()
            task = bars.add_task(f"fetching {what}", total=total)
        try:
            yield lambda size: bars.advance(task, size)
        finally:
            with self._lock:
                bars.remove_task(task)
                if not bars.tasks:
                    bars.stop()
                    self._bars = None


_display = _Display()
