"""`new`: a patch's folder to begin with. `ready`: what a folder still lacks."""

from __future__ import annotations

import ast
import difflib
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_livepatch import patches as own_patches
from vllm_livepatch.sitecustomize import fingerprint, no_function
from vllm_livepatch.sitecustomize.decision import Patch, PatchError, module_of
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.sitecustomize.settings import GROUPS
from vllm_livepatch.tools import patch_lock
from vllm_livepatch.tools.bundles import catalogue, leading, patch_files
from vllm_livepatch.tools.bundles.patch_files import PROOF
from vllm_livepatch.tools.commands.rendering import FAULT, SEEN
from vllm_livepatch.tools.diffs.folder import folder_of
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import forms
from vllm_livepatch.tools.releases import published
from vllm_livepatch.tools.releases.sources import SourcesError

TODO = "TODO"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TOLD = ("fault", "symptom", "why", "change", "origin", "threads")
"""What `about` says of a patch to those who look for it."""
_OURS: dict[str, set[str]] = {
    "without": set(),
    "seen": {"under", "what"},
    "gives_up": {"what", "protects", "evidence"},
    "own_error": {"changed", "done"},
    "gone": set(),
    "keeps": set(),
    "counters": set(),
}
"""What `about` says besides of a patch of this project, and each entry's keys: rows of the pages about all patches."""

_TOML = """format = 1
version = 1
title = "{todo}: what is so with this patch, in one line"
package = "{package}"
# group = "mine"  # LIVEPATCH_GROUP_MINE switches its patches. Of this project's: {groups}
targets = [
{targets}
]

# [[option]]  # a variable, LIVEPATCH_{variable}_LIMIT: wrappers.py reads livepatch.options["LIMIT"]
# name = "LIMIT"
# default = 8
# minimum = 1
# help = "what it says, in a sentence"

[about]
fault = "{todo}: {most} characters"
symptom = "{todo}: what a user sees, with the words of the log"
why = "{todo}: what goes wrong, in which code"
change = "{todo}: what this patch does about it"
origin = "{todo}: who found it, where"
threads = []  # upstream's, such as "vllm#43226"

# What is empty from here on is asked of a patch that comes with vllm-livepatch (docs/patch-toml.md says more of each).
without = ""  # what a user has without the patch, in sentences
gone = ""  # what the code takes for the end of a peer, a transfer or a hold

[[about.seen]]
under = ""  # where a user looks in docs/troubleshooting.md: {seen}
what = ""  # what a user sees, with messages of `symptom`

[[about.gives_up]]
what = ""  # what the patch gives up, ends or frees
protects = ""  # who may still read or write it, and why it is nobody's any more
evidence = ""  # the tests that show so

[about.own_error]
changed = ""  # what is half-done where the patch's code raises
done = ""  # what is then done about it

[about.keeps]  # each container, thread, socket and file that outlives a call = "for what, until when, how much"

[about.counters]  # each counter = "what it counts"
"""

_FUNCTION = """\
    {prefix}def {name}({parameters}) -> Any:
        {answer}
"""


_AFTER_IMPORT = """\
    def change_{name}(module: Any) -> None:
        \"\"\"{todo}: what is put where {qualname} stands, in the module that has been imported.\"\"\"

    def is_there_{name}(module: Any) -> bool:
        return module.{qualname} is not None  # {todo}: whether it is, as callers find it
"""


_PROOF = '''"""{todo}: what is looked at, in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def look() -> str | None:
    """What went wrong, or nothing: the fault on the code as it is, nothing where the patch is applied."""
    return "{todo}: nothing was looked at"


def cases() -> Mapping[str, Callable[[], str | None]]:
    """By its sentence, what is looked at."""
    return {{"{todo}: what is looked at, in a sentence.": look}}
'''


def new(name: str, targets: Sequence[str], out: Path, tree: Tree) -> Path:
    """Write OUT/name_with_underscores/ for these targets as the tree has them. Raises UserError, and writes nothing."""
    name = name.replace("_", "-")
    folder = folder_of(name, out)
    if name in catalogue.load():
        raise UserError(f"{name} is a patch that comes with vllm-livepatch: give yours another name")
    package = module_of(targets[0]).partition(".")[0]
    try:
        to_patch(name, {"title": TODO, "package": package, "targets": list(targets)})
    except PatchError as error:
        raise UserError(str(error)) from error
    functions, entries, used = [], [], set[str]()
    for target in targets:
        node, form = _found(tree, target)
        called = target.rpartition(".")[2].rpartition(":")[2].strip("_") or "wrapper"
        while called in used:
            called += "_"
        used.add(called)
        qualname = target.partition(":")[2]
        if form and isinstance(node, _FUNCTIONS):
            functions.append(_function(node, called, "." in qualname))
            entries.append(f'        "{target}": {form.format(called)},')
        else:
            functions.append(_AFTER_IMPORT.format(name=called, qualname=qualname, todo=TODO))
            entries.append(f'        "{target}": livepatch.after_import(change_{called}, is_there_{called}),')
    code = [
        f'"""{TODO}: what is so with this patch, in one line."""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Mapping",
        "from typing import Any",
        "",
        "",
        "def wrappers(livepatch: Any) -> Mapping[str, Any]:",
        '    """What is to stand at each target. `livepatch` has options, facts, count(), say() and tell()."""',
        "",
        *functions,
        "    return {",
        *entries,
        "    }",
        "",
    ]
    listed = "\n".join(f'    "{target}",' for target in targets)
    files = {
        "patch.toml": _TOML.format(
            todo=TODO,
            variable=folder.name.upper(),
            most=FAULT,
            package=package,
            targets=listed,
            groups=", ".join(GROUPS),
            seen=", ".join(SEEN),
        ),
        "wrappers.py": "\n".join(code),
        PROOF: _PROOF.format(todo=TODO),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=out) as temporary:
            made = Path(temporary, folder.name)
            made.mkdir()
            for file, text in files.items():
                (made / file).write_text(text, "utf-8")
            made.rename(folder)
    except OSError as error:
        raise UserError(f"the patch cannot be written to {folder}: {error.strerror or error}") from error
    return folder


def _found(tree: Tree, target: str) -> tuple[ast.AST, str]:
    """The target's definition, and how a wrapper is given for it; empty where `after_import` alone can change it.

    Raises UserError, which names what is near.
    """
    module, _, qualname = target.partition(":")
    try:
        source = tree.source(module)
    except SourcesError as error:
        raise UserError(str(error)) from error
    if source is None:
        raise UserError(f"there is no module {module}")
    parsed = fingerprint.parsed(source)
    node = fingerprint.find(parsed, qualname)
    if node is not None:
        why = forms.refused(source, qualname)
        if why:
            raise UserError(f"no wrapper can stand for {target}: {why}")
        ways = {"{}": leading.yields, "livepatch.wrapt({})": no_function.Proxy(leading.yields)}  # any function will do
        return node, next((form for form, way in ways.items() if not forms.refused(source, qualname, way)), "")
    near = difflib.get_close_matches(qualname, _functions(parsed), 1)
    raise UserError(f"{module} has no {qualname}" + (f"; did you mean {near[0]}?" if near else ""))


def _functions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        front = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        yield from (front + one.name for one in inner if isinstance(one, _FUNCTIONS))


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, in_class: bool) -> str:
    """A wrapper that changes nothing, with the parameters that its target has no default for."""
    own = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    own = own[: len(own) - len(node.args.defaults)]
    first: list[str] = []
    if in_class and "staticmethod" not in {getattr(one, "id", "") for one in node.decorator_list}:
        first, own = ["instance"], own[1:]
    given = [*own, "*rest", "**named"]
    parameters = [*(f"{one}: Any" for one in ("original", *first, *own)), "*rest: Any", "**named: Any"]
    awaited = isinstance(node, ast.AsyncFunctionDef) and not leading.yields(node)  # a generator is given on, as it is
    return _FUNCTION.format(
        prefix="async " if awaited else "",
        name=name,
        parameters=", ".join(parameters),
        answer=f"return {'await ' if awaited else ''}original({', '.join(given)})",
    )


def missing(folder: Path) -> list[str]:
    """What a patch's folder lacks, a sentence each. Raises UserError where it cannot be read at all."""
    entry = catalogue.read(folder)
    patch = entry.patch
    found = list(untold(folder, patch))
    if patch.diff:
        return found
    text = (folder / "wrappers.py").read_text("utf-8")
    if TODO in text:
        found.append(f"wrappers.py still has a {TODO}")
    proof = folder / PROOF
    if not proof.is_file():
        found.append(f"there is no {PROOF}, which shows the fault, and that it is gone")
    else:
        found.extend(_of_proof(proof.read_text("utf-8")))
    counted = set(re.findall(r"livepatch\.(?:count|tell)\(\s*[\"']([a-z_]+)[\"']", _code(folder)))
    for kind in sorted(counted - set(patch.about.get("counters", {}))):
        found.append(f"patch.toml does not say what the counter {kind} means, in [about.counters]")
    if not (folder / patch_lock.NAME).is_file() and not patch.variants:
        return [
            *found,
            f"there is no {patch_lock.NAME}: vllm-livepatch lock {folder} --release {patch.package}==VERSION",
        ]
    return [*found, *_out_of_date(patch), *_misread(folder, patch)]


def _of_proof(text: str) -> Iterator[str]:
    """What `prove` would say of a proof before it plays it."""
    if TODO in text:
        yield f"{PROOF} still has a {TODO}"
    try:
        defined = fingerprint.find(ast.parse(text), "cases")
    except (SyntaxError, ValueError) as error:
        yield f"{PROOF} is no Python: {error}"
    else:
        if defined is None:
            yield f"{PROOF} defines no cases()"


def untold(folder: Path, patch: Patch) -> Iterator[str]:
    """What patch.toml does not tell people, a sentence each; of a folder of this project's, what its pages need too."""
    told = {"title": patch.title, **{key: patch.about.get(key) for key in _TOLD}}
    for key, value in told.items():
        if value is None or (isinstance(value, str) and (not value.strip() or value.startswith(TODO))):
            yield f"patch.toml does not say: {key}"
    if len(str(patch.about.get("fault", ""))) > FAULT:
        yield f"patch.toml: fault has more than {FAULT} characters, which have no room in a row of check"
    if folder.resolve().parent in [Path(place).resolve() for place in own_patches.__path__]:
        yield from unsaid(patch)


def unsaid(patch: Patch) -> Iterator[str]:
    """What the pages about all patches need of one of this project's, a sentence each where it is not there."""
    if patch.group not in GROUPS:
        yield f"patch.toml: group is none of {', '.join(GROUPS)}"
    for key, parts in _OURS.items():
        told = patch.about.get(key)
        if told is None or told == "" or (parts and not told):
            yield f"patch.toml does not say: about.{key}"
        elif parts:
            rows = told if isinstance(told, list) else [told]
            for lacks in (parts - {part for part in one if one[part]} for one in rows):
                yield from (f"patch.toml does not say: about.{key}, {part}" for part in sorted(lacks))
    for one in patch.about.get("seen", ()):
        if one.get("under") not in SEEN:
            yield f"patch.toml: under in [[about.seen]] is none of {', '.join(SEEN)}"


def _code(folder: Path) -> str:
    return "\n".join(file.read_text("utf-8") for file in patch_files.code(folder))


def _out_of_date(patch: Patch) -> Iterator[str]:
    forms = [form for package in patch.packages for form in patch.forms(package)]
    for name in patch.names:
        if not any(name in form.code for form in forms):
            yield f"no release in {patch_lock.NAME} has {name}: a slip, or it is to be locked again"


def _misread(folder: Path, patch: Patch) -> Iterator[str]:
    for variant in patch.variants:
        if variant.applies and variant.verdict != "not-present":
            wrappers = leading.made(folder, patch, variant)
            unlike = forms.unlike(patch, wrappers)
            if unlike:
                yield unlike
                return
            try:
                tree = published.tree(patch.package, variant.releases[-1])
                yield from (f"{variant.releases[-1]}: {why}" for why in leading.misread(wrappers, tree))
            except SourcesError:  # a nightly: `lock` has looked at it
                continue
