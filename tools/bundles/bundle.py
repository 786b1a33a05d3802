"""What is in a bundle: the same bytes for the same input."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType

import wrapt
from vllm_livepatch import sitecustomize
from vllm_livepatch.sitecustomize import cache, fingerprint
from vllm_livepatch.tools import in_bundle
from vllm_livepatch.tools.bundles import patch_files, sbom, whole_texts
from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.bundles.displaced import is_shipped
from vllm_livepatch.tools.bundles.placing import write_directory
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.verifying import MANIFEST, verified

PACKAGE = "_vllm_livepatch"
_MAY_ASK = re.compile(r"wrapt|vendor|\\[xuN0-7]")
"""In a source whose code may import wrapt; a name may be spelt by escapes."""
_TARGETS, _FINDING, _GENERATION = "\nTARGETS = {}  #", '\nFINDING = ""  #', b'GENERATION = ""  #'


def version() -> str:
    return metadata.version("vllm-livepatch")


def contents(entries: Mapping[str, Entry], extensions: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """Every file of the bundle by its path in it. `extensions` are wrapt's compiled forms, by file name: with them the
    bundle holds wrapt, and without them where a patch asks for it.

    At the top lies what is looked for there: by Python's start, and by people. All else is in one folder, the
    generation, which is named by what is in it: an upgrade puts another one beside it, and then replaces the entry,
    which names it.
    """
    with_wrapt = bool(extensions) or asks_for_wrapt(entries)
    package = {**_runtime(), **_answers(), **_patches(entries, with_wrapt)}
    if with_wrapt:
        package |= _wrapt(extensions or {})
    library = metadata.version("wrapt") if with_wrapt else None
    digests = {name: digest_of(item.folder) for name, item in entries.items()}
    bill = sbom.make(version(), library, digests, extensions or {})
    main = (_rooms(in_bundle) / "main.py").read_bytes()
    top = {"sitecustomize.py": _entry(entries), "__main__.py": main, sbom.SBOM: bill}
    generation = f"livepatch-{version()}-{_digest_of({**package, **top})[:16]}"
    files = {f"{generation}/{PACKAGE}/{name}": data for name, data in package.items()}
    for name, data in top.items():
        files[name] = data.replace(_GENERATION, f'GENERATION = "{generation}"  #'.encode())
    files[MANIFEST] = files[f"{generation}/{MANIFEST}"] = _json(
        {
            "vllm-livepatch": version(),
            "wrapt": library,
            "python": ">=3.10,<3.15",
            "patches": sorted(entries),
            "extensions": sorted(extensions or {}),
            "generation": generation,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
        }
    )
    return files


def asks_for_wrapt(entries: Mapping[str, Entry]) -> bool:
    """Whether the code of a patch imports wrapt, by a statement or by the whole name of the bundle's copy."""
    sources = (file for item in entries.values() for file in patch_files.code(item.folder))
    return any(_asks(file.read_text("utf-8", "surrogateescape")) for file in sources)


def _asks(source: str) -> bool:
    if not _MAY_ASK.search(source):
        return False
    try:
        nodes = list(ast.walk(fingerprint.parsed(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "wrapt" in source
    imports = (node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))
    named = {alias.name for node in imports for alias in node.names}
    named |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    named |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named |= {node.attr for node in nodes if isinstance(node, ast.Attribute)} & {"wrapt"}  # livepatch.wrapt
    return any({"wrapt", "vendor"} & set(re.split("[.:]", name)) for name in named)


def digest(files: Mapping[str, bytes]) -> str:
    """What names a bundle, whoever made it and whatever holds it: the digest of its manifest."""
    return "sha256:" + hashlib.sha256(files[MANIFEST]).hexdigest()


def _entry(entries: Mapping[str, Entry]) -> bytes:
    """What Python's start runs, the generation's name still to come."""
    entry, finding = ((_rooms(sitecustomize) / name).read_text("utf-8") for name in ("entry.py", "finding.py"))
    places = (_TARGETS, _FINDING, _GENERATION.decode())
    if any(entry.count(place) != 1 for place in places) or "'''" in finding or not finding.isascii():
        raise AssertionError("entry.py has no place for the targets, the generation and finding.py")
    targets = json.dumps({**_targets(entries), PACKAGE: "own"}, sort_keys=True)
    entry = entry.replace(_TARGETS, f"\nTARGETS = {targets}  #")
    return entry.replace(_FINDING, f"\nFINDING = r'''{finding}'''  #").encode()


def _runtime() -> dict[str, bytes]:
    """What runs in the process once a target is imported."""
    sources = sorted(_rooms(sitecustomize).glob("*.py"))
    files = {
        f"sitecustomize/{source.name}": source.read_bytes()
        for source in sources
        if source.name not in ("entry.py", "finding.py", "vendored.py")
    }
    return {**files, "__init__.py": b""}


def _answers() -> dict[str, bytes]:
    """What the bundle answers by itself: its own commands."""
    tools = _rooms(in_bundle).parent
    sources = [tools / "errors.py", *(source for source in _rooms(in_bundle).glob("*.py") if source.name != "main.py")]
    files = {f"tools/{source.relative_to(tools).as_posix()}": source.read_bytes() for source in sorted(sources)}
    return {**files, "tools/__init__.py": b""}


def _patches(entries: Mapping[str, Entry], with_wrapt: bool) -> dict[str, bytes]:
    """The patches' code, and what is known of them."""
    files: dict[str, bytes] = {"patches/__init__.py": b""}
    for item in entries.values():
        files[f"patches/{item.folder.name}/__init__.py"] = b""
        for source in patch_files.files(item.folder):
            if source.name not in patch_files.FACTS:
                files[f"patches/{item.folder.name}/{source.relative_to(item.folder).as_posix()}"] = source.read_bytes()
    catalogue = {
        "version": version(),
        "wrapt": with_wrapt,
        "patches": {name: item.facts for name, item in sorted(entries.items())},
        "digests": {name: digest_of(item.folder) for name, item in sorted(entries.items())},
        "shipped": sorted(name for name, item in entries.items() if is_shipped(item.folder)),
        "texts": whole_texts.read(item.patch for item in entries.values()),
        "changes": {
            name: [change.to_json() for change in item.changes()]
            for name, item in sorted(entries.items())
            if item.patch.diff
        },
    }
    return {**files, "catalogue.json": _json(catalogue)}


def _wrapt(extensions: Mapping[str, bytes]) -> dict[str, bytes]:
    """For patches that import it. An interpreter takes the extension whose name says that it is for it, or none."""
    files = {"vendor/__init__.py": (_rooms(sitecustomize) / "vendored.py").read_bytes()}
    for source in sorted(Path(wrapt.__file__).parent.glob("*.py")):
        files[f"vendor/wrapt/{source.name}"] = source.read_bytes()
    for licence in metadata.files("wrapt") or []:
        if licence.name == "LICENSE":
            files["vendor/wrapt/LICENSE"] = Path(str(licence.locate())).read_bytes()
    return {**files, **{f"vendor/wrapt/{name}": data for name, data in extensions.items()}}


def _rooms(package: ModuleType) -> Path:
    return Path(next(iter(package.__path__)))


def _targets(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Each module that a patch names, and what is done to it, in the entry's words."""
    modules = [name for item in entries.values() for name in item.patch.modules]
    targets = {name.partition(".")[0]: "package" for name in modules} | dict.fromkeys(modules, "wrapped")
    for item in entries.values():
        for change in item.changes() if item.patch.diff else ():
            added = "added package" if change.package else "added"
            targets[change.module] = added if change.added else "changed"
    return targets


def cached(files: Mapping[str, bytes]) -> Path:
    """A directory that holds this bundle, in the user's cache (or a temporary place where that cannot be written).

    Both are the user's alone: what is in there is executed. Raises UserError where there is none.
    """
    name = Path("bundles", hashlib.sha256(files[MANIFEST]).hexdigest()[:16])
    for mode in (os.X_OK, os.W_OK | os.X_OK):  # what is there already can be used also where nothing can be written
        place = cache.directory(os.environ, mode)
        with contextlib.suppress(UserError):
            if place is not None and not verified(Path(place, name)).differences:
                return Path(place, name)
    if place is None:
        raise UserError(
            "there is no place for the bundle: neither the user's cache nor a temporary directory can be written; "
            "`generate --out DIR` writes it elsewhere, and a process needs no more than PYTHONPATH=DIR"
        )
    write_directory(files, Path(place, name))  # over what is damaged: processes run it
    return Path(place, name)


def _digest_of(files: Mapping[str, bytes]) -> str:
    lines = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest_of(folder: Path) -> str:
    """What of a patch folder decides what the patch does."""
    files = patch_files.files(folder)
    digests = (f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
