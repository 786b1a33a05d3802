"""`generate --guard DIR`: the distribution vllm-livepatch-guard, to be installed, or put on the path as it is."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from vllm_livepatch import sitecustomize
from vllm_livepatch.sitecustomize.decision import module_of
from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.errors import UserError

PACKAGE = "vllm_livepatch_guard"
ENTRY_POINT = f"[vllm.general_plugins]\nlivepatch = {PACKAGE}:check\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: vllm-livepatch\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
PLACES = ('\nVERSION = ""  #', "\nMODULES: dict[str, list[str]] = {}  #", "\nDEFAULT: list[str] = []  #")
BACKEND = '''\
"""Makes the wheel of the files that are here, for `pip install DIR`: it needs nothing but the standard library."""

import os
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    folders = [name for name in sorted(os.listdir(HERE)) if name == "{package}" or name.endswith(".dist-info")]
    name = "{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for folder in folders:
            for file in sorted(os.listdir(os.path.join(HERE, folder))):
                if os.path.isfile(os.path.join(HERE, folder, file)):
                    wheel.write(os.path.join(HERE, folder, file), folder + "/" + file)
    return name
'''


def contents(entries: Mapping[str, Entry]) -> dict[str, bytes]:
    """Every file by its path: the package, its metadata, and what `pip install` needs to make a wheel of both."""
    version = metadata.version("vllm-livepatch")
    runtime = Path(next(iter(sitecustomize.__path__)))
    plugin = (runtime / "vllm_plugin.py").read_text("utf-8")
    modules = {name: sorted({module_of(one) for one in entry.patch.targets}) for name, entry in sorted(entries.items())}
    default = [name for name, entry in sorted(entries.items()) if entry.patch.auto == "needed"]
    for place, value in zip(PLACES, (version, modules, default), strict=True):
        if plugin.count(place) != 1:
            raise AssertionError(f"vllm_plugin.py has no place for{place}")
        plugin = plugin.replace(place, f"{place.rpartition('= ')[0]}= {json.dumps(value)}  #")
    information = f"{PACKAGE}-{version}.dist-info"
    files = {
        f"{PACKAGE}/__init__.py": plugin.encode(),
        f"{PACKAGE}/__main__.py": b"from . import main\n\nmain()\n",
        **{f"{PACKAGE}/{name}.py": (runtime / f"{name}.py").read_bytes() for name in _imported(runtime, "vllm_plugin")},
        f"{information}/METADATA": (
            f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: {version}\n"
            "Summary: Says in every vLLM process whether a vllm-livepatch bundle is armed in it\n"
            "License: Apache-2.0\nRequires-Python: >=3.10\n"
        ).encode(),
        f"{information}/WHEEL": WHEEL.encode(),
        f"{information}/entry_points.txt": ENTRY_POINT.encode(),
    }
    recorded = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    files[f"{information}/RECORD"] = "\n".join([*recorded, f"{information}/RECORD,,", ""]).encode()
    files["pyproject.toml"] = b'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files["backend.py"] = BACKEND.replace("{package}", PACKAGE).replace("{version}", version).encode()
    return files


def write(entries: Mapping[str, Entry], out: Path) -> None:
    """Write it beside `out` and move it there. An older one is replaced; anything else is left alone."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / PACKAGE).is_dir())):
        raise UserError(f"{out} exists and is not a guard: name a new directory")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            new = Path(temporary, "new")
            for name, data in contents(entries).items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(data)
                (new / name).chmod(0o644)
            for folder in (new, *(place for place in new.iterdir() if place.is_dir())):
                os.chmod(folder, 0o755)
            if out.exists():
                out.rename(Path(temporary, "old"))
            new.rename(out)
    except OSError as error:
        raise UserError(f"the guard cannot be written to {out}: {error.strerror or error}") from error


def _imported(runtime: Path, module: str) -> set[str]:
    """The modules of the runtime that one of them imports, and those that these do."""
    found: set[str] = set()
    rest = [module]
    while rest:
        tree = ast.parse((runtime / f"{rest.pop()}.py").read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = {node.module} if node.module else {alias.name for alias in node.names}
                rest += sorted(names - found)
                found |= names
    return found


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
