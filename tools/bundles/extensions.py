"""wrapt's compiled form for the interpreters and machines that a bundle is for, which need not be this one.

Which files these are is pinned in `wrapt.toml` by their SHA-256, so that a bundle is the same wherever it is made. They
are taken from this installation, from the user's cache, or from the registry's wheels.

    python -m vllm_livepatch.tools.bundles.extensions VERSION    # prints wrapt.toml for another version of wrapt
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import wrapt
from vllm_livepatch.sitecustomize import cache
from vllm_livepatch.tools import user_cache
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.toml import tomllib

PINS_FILE = Path(__file__).with_name("wrapt.toml")
SERVED = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = {"x86_64": "manylinux_2_28_x86_64", "aarch64": "manylinux_2_28_aarch64"}
_ALSO_CALLED = {"x86-64": "x86_64", "amd64": "x86_64", "arm64": "aarch64"}
_AT_ONCE = 4


@dataclass(frozen=True)
class Extension:
    """One compiled form: of which wheel, and as which file in it. Both digests are hexadecimal SHA-256."""

    python: str
    arch: str
    wheel: str
    wheel_sha256: str
    file: str
    sha256: str

    @property
    def what_for(self) -> str:
        return f"{self.python} {self.arch}"


@functools.cache
def pinned() -> tuple[str, tuple[Extension, ...]]:
    """The version of wrapt, and its compiled forms."""
    found: dict[str, Any] = tomllib.loads(PINS_FILE.read_text("utf-8"))
    return found["version"], tuple(Extension(**table) for table in found["extension"])


def chosen(pythons: Sequence[str] = (), machines: Sequence[str] = ()) -> list[Extension]:
    """Those of the named interpreters and machines, of all where none is named. Raises UserError."""
    found = pinned()[1]
    machines = [_ALSO_CALLED.get(machine.lower(), machine.lower()) for machine in machines]
    asked = (("--python", pythons, SERVED), ("--arch", machines, tuple(MACHINES)))
    for option, values, offered in asked:
        for value in values:
            if value not in offered:
                raise UserError(f"{option} {value}: a bundle is for {', '.join(offered)}")
    return [one for one in found if one.python in (pythons or SERVED) and one.arch in (machines or MACHINES)]


def at_hand(wanted: Sequence[Extension]) -> dict[str, bytes]:
    """What this installation or the cache has, by file name. Another version's would not fit the rest of wrapt."""
    if metadata.version("wrapt") != pinned()[0]:
        return {}
    found: dict[str, bytes] = {}
    for one in wanted:
        for place in (Path(wrapt.__file__).with_name(one.file), _place(one)):
            content = place.read_bytes() if place.is_file() else b""
            if hashlib.sha256(content).hexdigest() == one.sha256:
                found[one.file] = content
                break
    return found


def gathered(wanted: Sequence[Extension], tell: Callable[[str], None]) -> dict[str, bytes]:
    """All of them by file name, fetched where they are not at hand. A line says what cannot be had."""
    version = pinned()[0]
    found = at_hand(wanted)
    missing = [one for one in wanted if one.file not in found]
    why = ""
    if missing and metadata.version("wrapt") != version:
        why = f"wrapt {metadata.version('wrapt')} is installed here, and {version} is pinned"
    elif missing:
        tell(f"fetching wrapt's compiled form, {len(missing)} files, once")
        fetched, why = _fetched(missing)
        found.update(fetched)
    lacking = [one.what_for for one in missing if one.file not in found]
    if lacking:
        tell(
            f"wrapt's compiled form is missing for {', '.join(lacking)} ({why}): the bundle is whole without, but "
            "its digest is another; a patch that imports wrapt gets the slower form there"
        )
    return dict(sorted(found.items()))


def _fetched(wanted: Sequence[Extension]) -> tuple[dict[str, bytes], str]:
    """What the registry gives of these, and the first reason why it does not give the rest."""
    from vllm_livepatch.tools.releases import registry
    from vllm_livepatch.tools.releases.registry import RegistryError
    from vllm_livepatch.tools.releases.sources import SourcesError

    found: dict[str, bytes] = {}
    why: list[str] = []
    with registry.open_session() as session:
        try:
            offered = {file.filename: file.url for file in registry.files("wrapt", session)}
        except RegistryError as error:
            return {}, str(error)

        def fetch(one: Extension) -> None:
            try:
                if one.wheel not in offered:
                    raise SourcesError(f"{one.wheel} is not in the registry")
                content = _of_wheel(one, offered[one.wheel], session)
                if hashlib.sha256(content).hexdigest() != one.sha256:
                    raise SourcesError(f"{one.file} in {one.wheel} is not the pinned one")
                cache.replace(str(_place(one)), content)
                found[one.file] = content
            except SourcesError as error:
                why.append(str(error))

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(fetch, wanted))
    return found, "; ".join(why[:1])


def _of_wheel(one: Extension, url: str, session: Any) -> bytes:
    from vllm_livepatch.tools.releases import archives
    from vllm_livepatch.tools.releases.registry import Wheel
    from vllm_livepatch.tools.releases.sources import SourcesError

    member = f"wrapt/{one.file}"

    def unpack(wheel: Wheel, file: Path) -> dict[str, bytes]:
        with archives.opened(file, f"the registry's {wheel.name}") as archive:
            return {name: archives.member(archive, name) for name in archive.namelist() if name == member}

    wheel = Wheel("wrapt", pinned()[0], one.wheel, url, one.wheel_sha256, False)
    contents = archives.whole(wheel, session, lambda line: None, unpack)[1]
    if member not in contents:
        raise SourcesError(f"{one.wheel} has no {member}")
    return contents[member]


def _place(one: Extension) -> Path:
    return user_cache.directory() / "extensions" / f"{one.sha256[:16]}-{one.file}"


def pins_of(version: str) -> str:
    """The text of `wrapt.toml` for a version, from the registry as it answers now."""
    from vllm_livepatch.tools.releases import archives, registry
    from vllm_livepatch.tools.releases.registry import Wheel

    def unpack(wheel: Wheel, file: Path) -> dict[str, bytes]:
        with archives.opened(file, wheel.name) as archive:
            return {name: archives.member(archive, name) for name in archive.namelist() if name.endswith(".so")}

    lines = [f'version = "{version}"']
    with registry.open_session() as session:
        offered = [file for file in registry.files("wrapt", session) if file.version == version]
        for python in SERVED:
            for arch, platform in MACHINES.items():
                tag = f"-cp{python.replace('.', '')}-cp{python.replace('.', '')}-"
                (file,) = [one for one in offered if tag in one.filename and platform in one.filename]
                sha256 = file.digests["sha256"]
                wheel = Wheel("wrapt", version, file.filename, file.url, sha256, False)
                ((name, content),) = archives.whole(wheel, session, lambda line: None, unpack)[1].items()
                values = {
                    "python": python,
                    "arch": arch,
                    "wheel": file.filename,
                    "wheel_sha256": sha256,
                    "file": name.rpartition("/")[2],
                    "sha256": hashlib.sha256(content).hexdigest(),
                }
                lines += ["", "[[extension]]", *(f'{key} = "{value}"' for key, value in values.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(pins_of(sys.argv[1]), end="")
