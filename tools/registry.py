"""Which files the package registry offers for a release, and which of them this project has pinned.

The registry is the Python package index that ``pip`` would ask: the one named by ``PIP_INDEX_URL``, else the
default of the ``pypi-simple`` library. The pins are the array tables of ``releases.toml`` beside this module,
one array per package, oldest release first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import requests
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DistributionPackage,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedContentTypeError,
    UnsupportedRepoVersionError,
)
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

PINS_FILE = Path(__file__).with_name("releases.toml")
TIMEOUT = (10.0, 60.0)
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
    sources_sha256: str


@dataclass(frozen=True)
class Wheel:
    """One published wheel; `sha256` is the registry's digest of the whole file."""

    package: str
    version: str
    name: str
    url: str
    sha256: str
    yanked: bool


@cache
def pins(package: str) -> tuple[Pin, ...]:
    """Return the pinned releases of `package` in the order of the file, which is oldest first."""
    with PINS_FILE.open("rb") as file:
        tables: dict[str, list[dict[str, str]]] = tomllib.load(file)
    return tuple(Pin(package=package, **table) for table in tables.get(canonicalize_name(package), []))


def pin(package: str, version: str) -> Pin | None:
    """Return the pin of one release, None where nobody pinned it."""
    return next((pin for pin in pins(package) if pin.version == version), None)


def find_wheel(package: str, version: str, session: requests.Session | None = None) -> Wheel:
    """Return the wheel whose sources stand for a release: the pinned one, else the newest x86_64 build.

    Raises RegistryError where the registry cannot be read, has no such release or no such wheel, and where
    the wheel it offers under a pinned name is not the pinned one.
    """
    pinned = pin(package, version)
    wheels = _wheels(package, version, session)
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


def _wheels(package: str, version: str, session: requests.Session | None) -> list[Wheel]:
    """Return all wheels of one release that an x86_64 machine can install; never empty."""
    files = _files(package, session)
    release = [file for file in files if _same_version(file.version, version)]
    if not release:
        raise RegistryError(f"{package} {version} is not in the registry{_newest(files)}")
    wheels = [
        Wheel(package, version, file.filename, file.url, file.digests["sha256"], file.is_yanked)
        for file in release
        if file.package_type == "wheel" and file.filename.endswith(("x86_64.whl", "-any.whl"))
    ]
    if not wheels:
        offered = ", ".join(sorted(file.filename for file in release))
        raise RegistryError(f"{package} {version} has no wheel for x86_64 in the registry, only {offered}")
    return wheels


def _files(package: str, session: requests.Session | None) -> list[DistributionPackage]:
    with new_session(session) as opened:
        client = PyPISimple(endpoint=os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT, session=opened)
        try:
            return client.get_project_page(package, timeout=TIMEOUT).packages
        except NoSuchProjectError:
            raise RegistryError(f"the registry has no package named {package}") from None
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError):
            raise RegistryError("the registry answered with something that is no package index") from None
        except requests.RequestException as error:
            raise RegistryError(f"the registry {what_happened(error)}") from error


def _preference(wheel: Wheel) -> tuple[bool, tuple[Any, ...], str]:
    """Order a release's wheels: not yanked, then the latest build, as pip does; the name settles ties."""
    try:
        build = tuple(parse_wheel_filename(wheel.name)[2])
    except InvalidWheelFilename:
        build = ()
    return (not wheel.yanked, build, wheel.name)


def _same_version(offered: str | None, wanted: str) -> bool:
    try:
        return offered is not None and Version(offered) == Version(wanted)
    except InvalidVersion:
        return False


def _newest(files: list[DistributionPackage]) -> str:
    versions = set()
    for file in files:
        try:
            versions.add(Version(file.version or ""))
        except InvalidVersion:
            continue
    final = [version for version in versions if not version.is_prerelease]
    return f"; the newest there is {max(final)}" if final else ""


@contextmanager
def new_session(session: requests.Session | None = None) -> Iterator[requests.Session]:
    """Yield `session`, or a new one that tries again when a server is briefly unable to answer."""
    if session is not None:
        yield session
        return
    with requests.Session() as opened:
        retry = Retry(total=3, backoff_factor=0.3, status_forcelist=(429, 500, 502, 503, 504))
        for scheme in ("http://", "https://"):
            opened.mount(scheme, HTTPAdapter(max_retries=retry))
        yield opened


def what_happened(error: requests.RequestException) -> str:
    """Say in a few words how a request failed, leaving out its address, which may hold credentials."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answered {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return f"did not answer in {TIMEOUT[1]:.0f} s"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached; is there a network?"
    return f"cannot be read: {type(error).__name__}"
