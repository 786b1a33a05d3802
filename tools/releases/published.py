"""The modules of a published release, as a process that has it installed would import them, without installing it.

Only what is asked for is read, by byte range, out of the wheel that the registry offers, and kept in the user's cache
by the wheel's digest; where ranges are refused the wheel is read whole, and where a release has no wheel its source
archive is. Nothing of it is executed. What goes wrong with the cache itself only costs time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from importlib.util import decode_source
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import requests
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from vllm_livepatch.sitecustomize import cache
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.sitecustomize.release_order import public_release
from vllm_livepatch.tools.releases import archives, registry, sources
from vllm_livepatch.tools.releases.registry import RegistryError, Wheel
from vllm_livepatch.tools.releases.sources import RangesRefusedError, SourcesError

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

GAP = 4 * 1024
"""Bytes between two wanted files that are worth reading: requests are made together, so they cost little time."""

Tell = archives.Tell


def say(line: str) -> None:
    print(f"vllm-livepatch: {line}", file=sys.stderr, flush=True)


class Files(Protocol):
    """The Python files of one release, by their paths in the wheel. `read` leaves out what is not there."""

    @property
    def names(self) -> Collection[str]: ...
    def has(self, name: str) -> bool: ...
    def read(self, names: Collection[str]) -> dict[str, bytes]: ...


class PublishedTree(Tree):
    """One release of one distribution. `version` is as asked for; `tops` are the packages that it holds.

    Raises SourcesError where something had to be read and could not be.
    """

    def __init__(self, package: str, version: str, name: str, files: Files, tops: Collection[str]) -> None:
        super().__init__([])
        self.package, self.version, self.name, self.tops = package, version, name, frozenset(tops)
        self._files = files
        self._contents: dict[str, bytes] = {}

    def has(self, module: str) -> bool:
        """Whether there is such a module with a source."""
        return self._path(module) is not None

    def source(self, module: str) -> str | None:
        if module in {f"{top}._version" for top in self.tops}:
            # The release is what was asked for: the file may lack the local part, and a source archive lacks the file.
            return f"__version__ = {self.version!r}\n"
        path = self._path(module)
        if path is None:
            return None
        self.prefetch([module])
        try:
            return decode_source(self._contents[path])
        except (KeyError, SyntaxError, UnicodeError):
            return None

    @property
    def files(self) -> Collection[str]:
        """The Python files that it has, by their paths."""
        return self._files.names

    def origin(self, module: str) -> str | None:
        path = self._path(module)
        return None if path is None else f"{self.name}/{path}"

    def prefetch(self, modules: Iterable[str]) -> None:
        """Read several modules together: that takes fewer requests."""
        wanted = {path for module in modules if (path := self._path(module)) is not None} - self._contents.keys()
        if wanted:
            self._contents.update(self._files.read(wanted))

    def _path(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}/__init__.py", f"{stem}.py") if self._files.has(path)), None)


def tree(package: str, version: str) -> PublishedTree:
    """The release `version` of the distribution `package`, from the registry or the cache. Raises SourcesError."""
    return _published_releases(registry.endpoints()).tree(package, version)


def wheel_file(file: Path) -> PublishedTree:
    """A wheel on this machine. Raises SourcesError."""
    try:
        name, version, _, _ = parse_wheel_filename(file.name)
    except InvalidWheelFilename as error:
        raise SourcesError(f"{file} is not named as a wheel is") from error
    files = _Archive(file)
    return PublishedTree(name, str(version), file.name, files, _tops(files.names))


@functools.cache
def _published_releases(endpoints: tuple[str, ...]) -> PublishedReleases:
    return PublishedReleases()


class PublishedReleases:
    """The releases that one set of indexes offers: what they were asked once is not asked again."""

    def __init__(self, tell: Tell = say) -> None:
        self._tell = tell
        self._session = registry.open_session()
        self._offered: dict[str, list[DistributionPackage]] = {}
        self._lock = threading.Lock()

    def offered(self, package: str) -> list[DistributionPackage]:
        """Every file of a package. Raises SourcesError."""
        with self._lock:
            if package not in self._offered:
                try:
                    self._offered[package] = registry.files(package, self._session)
                except RegistryError as error:
                    raise SourcesError(str(error)) from error
            return self._offered[package]

    def newest(self, package: str) -> str:
        """The newest final release that has a wheel. Raises SourcesError."""
        final = registry.final_releases(self.offered(package))
        if not final:
            raise SourcesError(f"{package} has no release in the registry that is final; name one: {package}==VERSION")
        return final[-1]

    def tree(self, package: str, version: str) -> PublishedTree:
        """As the function `tree`."""
        package = canonicalize_name(package)
        pinned = registry.pin(package, version)
        if pinned is not None:
            whole = sources.cached(package, version)
            if whole is not None:
                return PublishedTree(package, pinned.version, pinned.wheel, _Directory(whole), [package])
        place = _place(package, pinned.version, pinned.sha256) if pinned is not None else None
        if pinned is not None and place is not None and _Kept.is_at(place):
            known = Wheel(package, pinned.version, pinned.wheel, "", pinned.sha256, False)
            return self._kept(package, version, known, place)
        wheel = self._find(package, version)
        return self._kept(package, version, wheel, _place(package, wheel.version, wheel.sha256 or _digest(wheel.url)))

    def _kept(self, package: str, version: str, wheel: Wheel, place: Path) -> PublishedTree:
        files = _Kept(wheel, place, self._session, self._tell, lambda: self._find(package, version))
        # 0.33 is 0.33.0; but a vendor's 0.33.0+rocm700 that is read in 0.33.0 stays what it is.
        release = version if public_release(version) != version else wheel.version
        return PublishedTree(package, release, wheel.name, files, _tops(files.names))

    def _find(self, package: str, version: str) -> Wheel:
        """The file that stands for a release; where no index answers, the one that did last time."""
        note = _root() / "found" / f"{package}-{version}-{_digest(' '.join(registry.endpoints()))}.json"
        try:
            wheel = registry.find_file(package, version, self.offered(package))
        except RegistryError as error:
            raise SourcesError(str(error)) from error
        except SourcesError as error:
            remembered = _remembered(note)
            if remembered is None:
                raise
            self._tell(f"{package} {version} is from the cache: {error}")
            return remembered
        if wheel.yanked:
            self._tell(f"{package} {version} was yanked{': ' if wheel.why_yanked else ''}{wheel.why_yanked}")
        if wheel.version != version and public_release(wheel.version) == public_release(version) != version:
            self._tell(f"{package} {version} is not in the registry: {wheel.version} is read in its place")
        cache.replace(str(note), json.dumps(asdict(wheel)).encode())
        return wheel


class _Directory:
    """Sources that lie unpacked."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def names(self) -> list[str]:
        return [file.relative_to(self._root).as_posix() for file in self._root.rglob("*.py")]

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    def read(self, names: Collection[str]) -> dict[str, bytes]:
        try:
            return {name: (self._root / name).read_bytes() for name in names if self.has(name)}
        except OSError as error:
            raise SourcesError(f"cannot read {self._root}: {error.strerror}") from error


class _Archive:
    """A wheel on this machine."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with archives.opened(file, file.name) as archive:
            self.names = {info.filename: info.CRC for info in archive.infolist() if archives.is_python(info.filename)}

    def has(self, name: str) -> bool:
        return name in self.names

    def read(self, names: Collection[str]) -> dict[str, bytes]:
        with archives.opened(self._file, self._file.name) as archive:
            return {name: archives.member(archive, name) for name in names if name in self.names}


class _Kept:
    """A published file of which the cache keeps the list of its Python files, and those that were asked for.

    `list.json` holds the checksum of each; a file of the cache that does not have it counts as not there. Every file is
    put there whole or not at all, so that several checks may use one cache at once.
    """

    def __init__(
        self, wheel: Wheel, place: Path, session: requests.Session, tell: Tell, find: Callable[[], Wheel]
    ) -> None:
        self._wheel, self._place, self._session, self._tell, self._find = wheel, place, session, tell, find
        self._fetched: dict[str, bytes] = {}
        self._open: tuple[zipfile.ZipFile, sources.SpanFetcher] | None = None  # its list of files takes most to read
        self._lock = threading.Lock()  # over what is open
        listed = _listed(place)
        if listed is None:
            self._fetch(())
        else:
            self.names = listed

    @staticmethod
    def is_at(place: Path) -> bool:
        return (place / "list.json").is_file()

    def has(self, name: str) -> bool:
        return name in self.names

    def read(self, names: Collection[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name in names:
            content = self._fetched.get(name) or cache.read(str(self._place / "files" / name))
            if content is not None and name in self.names and zlib.crc32(content) == self.names[name]:
                found[name] = content
        missing = [name for name in names if name in self.names and name not in found]
        if missing:
            self._fetch(missing)
            found.update({name: self._fetched[name] for name in missing if name in self._fetched})
        return found

    def _fetch(self, names: Collection[str]) -> None:
        """Read the list and the files called `names`; all of them where the server gives nothing less."""
        wheel = self._wheel if self._wheel.url else self._find()
        if not wheel.name.endswith(".whl"):
            self._keep(*archives.whole(wheel, self._session, self._tell, archives.of_source_archive))
            return
        try:
            with self._lock, sources.reading(wheel):
                archive, fetcher = self._open = self._open or sources.open_wheel(wheel, self._session)
                listed = {info.filename: info.CRC for info in archive.infolist() if archives.is_python(info.filename)}
                wanted = [archive.getinfo(name) for name in names if name in listed]
                for info in wanted:
                    archives.check_size(info, wheel.name)
                self._keep(listed, dict(sources.read(archive, fetcher, wanted, gap=GAP)))
        except RangesRefusedError:
            self._tell(f"{wheel.name}: the server gives no parts of a file, so it is read whole")
            self._keep(*archives.whole(wheel, self._session, self._tell, archives.of_wheel))

    def _keep(self, listed: dict[str, int], contents: dict[str, bytes]) -> None:
        self.names = listed
        self._fetched.update(contents)
        kept = [
            cache.replace(str(self._place / "files" / sources.safe(name, self._wheel)), content)
            for name, content in contents.items()
        ]
        # Last, since with it there the place counts as known.
        if not all([*kept, cache.replace(str(self._place / "list.json"), json.dumps(listed).encode())]):
            self._tell(f"{self._place.parent} cannot be written (a full disk?): nothing is kept there")


def _tops(names: Iterable[str]) -> set[str]:
    return {name.partition("/")[0] for name in names}


def _listed(place: Path) -> dict[str, int] | None:
    """What `list.json` says, None where there is none that can be used."""
    content = cache.read(str(place / "list.json"))
    try:
        listed = json.loads(content) if content is not None else None
    except ValueError:
        return None
    return listed if isinstance(listed, dict) else None


def _remembered(note: Path) -> Wheel | None:
    content = cache.read(str(note))
    try:
        return None if content is None else Wheel(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _root() -> Path:
    return sources.cache_directory().with_name("published")


def _place(package: str, version: str, digest: str) -> Path:
    return _root() / f"{package}-{version}-{digest[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
