"""Which files the package registry offers for a release, and which of them this project has pinned.

The registry is the Python package index that ``pip`` would ask: the one of ``PIP_INDEX_URL``, else of pip's
configuration files, else the default of the ``pypi-simple`` library; and pip's extra indexes. The pins are the array
tables of ``releases.toml`` beside this module, one array per package, oldest release first.
"""

from __future__ import annotations

import configparser
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from requests.adapters import HTTPAdapter
from urllib3.util import Retry
from vllm_livepatch.sitecustomize.release_order import public_release
from vllm_livepatch.tools.toml import tomllib

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

PINS_FILE = Path(__file__).with_name("releases.toml")
TIMEOUT = (10.0, 30.0)
"""Seconds to connect, and seconds without a byte, after which a request counts as failed."""


class RegistryError(Exception):
    """The registry has no such thing, or gave no usable answer; the message is one line for people."""


@dataclass(frozen=True)
class Pin:
    """A release whose files were looked at: names and digests (hexadecimal SHA-256) that must not change."""

    package: str
    version: str
    wheel: str
    sha256: str
    sources_sha256: str = ""
    read: bool = False  # the release tests do not drive it: only its fingerprints are known


@dataclass(frozen=True)
class Wheel:
    """One published wheel, or source archive; `sha256` is the registry's digest of the whole file, empty where none."""

    package: str
    version: str
    name: str
    url: str
    sha256: str
    yanked: bool
    size: int | None = None
    why_yanked: str = ""


def pins(package: str) -> tuple[Pin, ...]:
    """Return the pinned releases of `package` that the release tests drive, oldest first."""
    return tuple(pin for pin in all_pins(package) if not pin.read)


@cache
def all_pins(package: str) -> tuple[Pin, ...]:
    """Return the pinned releases of `package`, those too that were only read, in the file's order: oldest first."""
    with PINS_FILE.open("rb") as file:
        tables: dict[str, list[dict[str, Any]]] = tomllib.load(file)
    return tuple(Pin(package=package, **table) for table in tables.get(canonicalize_name(package), []))


def pin(package: str, version: str) -> Pin | None:
    """Return the pin of one release, None where nobody pinned it."""
    return next((pin for pin in all_pins(package) if _same_version(pin.version, version)), None)


def find_wheel(
    package: str,
    version: str,
    session: requests.Session | None = None,
    offered: Sequence[DistributionPackage] | None = None,
) -> Wheel:
    """Return the wheel whose sources stand for a release: the pinned one, else the newest x86_64 build.

    `offered` is what `files` gave, asked for where None. Raises RegistryError where the registry cannot be read, has
    no such release or no such wheel, and where the wheel it offers under a pinned name is not the pinned one.
    """
    pinned = pin(package, version)
    wheels = _wheels(package, version, files(package, session) if offered is None else offered)
    if pinned is None:
        return max(wheels, key=_preference)
    for wheel in wheels:
        if wheel.name == pinned.wheel:
            if wheel.sha256 != pinned.sha256:
                raise RegistryError(
                    f"{wheel.name}: the registry's SHA-256 {wheel.sha256} is not the pinned {pinned.sha256}"
                )
            return wheel
    raise RegistryError(f"{package} {version}: the pinned wheel {pinned.wheel} is not in the registry")


def find_file(package: str, version: str, offered: Sequence[DistributionPackage]) -> Wheel:
    """Return the file whose sources stand for a release: a wheel, of any machine if need be, or a source archive.

    Raises RegistryError where there is neither, or the release is not there.
    """
    release = _release(package, version, offered)
    if any(_is_ours(file) for file in release):
        return find_wheel(package, version, offered=offered)
    wheels = [_wheel(package, file) for file in release if file.package_type == "wheel"]
    if wheels:
        return max(wheels, key=_preference)
    archives = [_wheel(package, file) for file in release if file.filename.endswith(".tar.gz")]
    if archives:
        return archives[0]
    raise RegistryError(f"{package} {version} has neither a wheel nor a source archive in the registry")


def files(package: str, session: requests.Session | None = None) -> list[DistributionPackage]:
    """Return every file of a package, of each index that pip would ask. Raises RegistryError."""
    # Half a second on a slow machine, which who needs no network should not pay.
    from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedContentTypeError, UnsupportedRepoVersionError

    found: list[DistributionPackage] | None = None
    with new_session(session) as opened:
        for endpoint in endpoints():
            client = PyPISimple(endpoint=endpoint, session=opened)
            try:
                found = [*(found or ()), *client.get_project_page(package, timeout=TIMEOUT).packages]
            except NoSuchProjectError:
                continue
            except (UnsupportedContentTypeError, UnsupportedRepoVersionError):
                raise RegistryError(
                    f"the registry{at(endpoint)} answered with something that is no package index"
                ) from None
            except requests.RequestException as error:
                raise RegistryError(f"the registry{at(endpoint)} {what_happened(error)}") from error
    if found is None:
        raise RegistryError(f"the registry has no package named {package}")
    return found


def final_releases(offered: Sequence[DistributionPackage]) -> list[str]:
    """Return the versions that have a wheel which is not yanked, oldest first, without candidates and nightlies."""
    versions = {
        Version(file.version or "")
        for file in offered
        if file.package_type == "wheel" and not file.is_yanked and _is_version(file.version)
    }
    return [str(version) for version in sorted(versions) if not version.is_prerelease and not version.local]


def endpoints() -> tuple[str, ...]:
    """Return the indexes that pip would ask, the extra ones last; those that are no web servers are left out."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    index = os.environ.get("PIP_INDEX_URL") or _configured("index-url") or PYPI_SIMPLE_ENDPOINT
    extra = os.environ.get("PIP_EXTRA_INDEX_URL") or _configured("extra-index-url")
    return (index, *(url for url in extra.split() if url.startswith(("http://", "https://"))))


def _configured(name: str) -> str:
    """Return what pip's configuration files say of an option: the last file wins, but [install] beats [global]."""
    home = Path.home()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    usual = [Path("/etc/pip.conf"), home / ".pip/pip.conf", config_home / "pip/pip.conf", Path(sys.prefix, "pip.conf")]
    found = {"global": "", "install": ""}
    for file in [*usual, Path(os.environ.get("PIP_CONFIG_FILE") or os.devnull)]:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (OSError, UnicodeError, configparser.Error):
            continue
        for section in found:
            found[section] = parser.get(section, name, fallback=found[section])
    return found["install"] or found["global"]


def _wheels(package: str, version: str, offered: Sequence[DistributionPackage]) -> list[Wheel]:
    """Return all wheels of one release that an x86_64 machine can install; never empty."""
    release = _release(package, version, offered)
    wheels = [_wheel(package, file) for file in release if _is_ours(file)]
    if not wheels:
        names = ", ".join(sorted(file.filename for file in release))
        raise RegistryError(f"{package} {version} has no wheel for x86_64 in the registry, only {names}")
    return wheels


def _is_ours(file: DistributionPackage) -> bool:
    return file.package_type == "wheel" and file.filename.endswith(("x86_64.whl", "-any.whl"))


def _release(package: str, version: str, offered: Sequence[DistributionPackage]) -> list[DistributionPackage]:
    """Return the files of one release; where none is exactly that, those that have a local part more, or one less.

    Never empty.
    """
    for local in (True, False):
        release = [file for file in offered if _same_version(file.version, version, local)]
        if release:
            return release
    if public_release(version) != version:
        return _release(package, public_release(version), offered)
    raise RegistryError(f"{package} {version} is not in the registry{_newest(offered)}")


def _wheel(package: str, file: DistributionPackage) -> Wheel:
    return Wheel(
        package,
        file.version or "",
        file.filename,
        file.url,
        file.digests.get("sha256", ""),
        file.is_yanked,
        file.size,
        file.yanked_reason or "",
    )


def _preference(wheel: Wheel) -> tuple[bool, tuple[Any, ...], str]:
    """Order a release's wheels: not yanked, then the latest build, as pip does; the name settles ties."""
    try:
        build = tuple(parse_wheel_filename(wheel.name)[2])
    except InvalidWheelFilename:
        build = ()
    return (not wheel.yanked, build, wheel.name)


def _same_version(offered: str | None, wanted: str, local: bool = True) -> bool:
    if not (_is_version(offered) and _is_version(wanted)):
        return False
    there, asked = Version(offered or ""), Version(wanted)
    return there == asked if local else Version(there.public) == asked


def _is_version(text: str | None) -> bool:
    try:
        Version(text or "")
    except InvalidVersion:
        return False
    return True


def _newest(offered: Sequence[DistributionPackage]) -> str:
    versions = [Version(file.version or "") for file in offered if _is_version(file.version)]
    final = [version for version in versions if not version.is_prerelease]
    return f"; the newest there is {max(final)}" if final else ""


@dataclass
class Traffic:
    """What all sessions asked for and were answered with so far, as the answers' headers say."""

    answers: int = 0
    bytes: int = 0
    asking: str = ""  # the host of the last request
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, response: requests.models.Response, **_: object) -> None:
        with self.lock:
            self.answers += 1
            self.bytes += int(response.headers.get("Content-Length") or 0)


traffic = Traffic()


class _Session(requests.Session):
    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        traffic.asking = host(request.url or "")
        return super().send(request, **options)


def host(url: str) -> str:
    """Return the name of an address's host: all of it that may be shown, since the rest may hold credentials."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def at(url: str) -> str:
    """Return ` at HOST`, for a message; nothing where an address names none."""
    found = host(url)
    return f" at {found}" if found else ""


@contextmanager
def new_session(session: requests.Session | None = None) -> Iterator[requests.Session]:
    """Yield `session`, or a new one, closed afterwards."""
    if session is not None:
        yield session
        return
    with open_session() as opened:
        yield opened


def open_session() -> requests.Session:
    """Return a session that tries again when a server is briefly unable to answer."""
    opened = _Session()
    # Who does not answer at all is asked once more, and not for minutes.
    retry = Retry(total=3, connect=1, read=1, backoff_factor=0.3, status_forcelist=(429, 500, 502, 503, 504))
    for scheme in ("http://", "https://"):
        opened.mount(scheme, HTTPAdapter(max_retries=retry))
    opened.hooks["response"].append(traffic.count)
    return opened


def what_happened(error: requests.RequestException) -> str:
    """Say in a few words how a request failed, leaving out its address, which may hold credentials."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answered {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return f"did not answer in {TIMEOUT[1]:.0f} s"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached; is there a network?"
    return f"cannot be read: {type(error).__name__}"
