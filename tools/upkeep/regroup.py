"""A patch's variants: for a new patch, and anew after its `calls` changed.

    python -m vllm_livepatch.tools.upkeep.regroup NAME...

For a checkout. The fingerprints of every release that patch.toml lists are computed; a variant whose releases do not
have one code becomes several, with its verdict and facts. Companions are all pinned releases of their package. What a
release is (`needed`, its facts) stays for a person to judge, and the release tests to show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from vllm_livepatch.sitecustomize import cache, installed
from vllm_livepatch.sitecustomize.decision import Patch, PatchError, module_of
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools.bundled import naming
from vllm_livepatch.tools.commands import ending
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import published, registry, releases_file
from vllm_livepatch.tools.releases.sources import SourcesError
from vllm_livepatch.tools.toml import tomllib
from vllm_livepatch.tools.upkeep import catalogue_edits, versions

Code = dict[str, str]


def regrouped(text: str, name: str) -> str:
    """A patch.toml with its variants and companions computed from its targets and calls.

    A variant needs its `releases` and nothing else. Raises UserError.
    """
    try:
        new = _regrouped(text, name)
        to_patch(name, tomllib.loads(new))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"patch {name}: {error}") from error
    except (PatchError, SourcesError) as error:
        raise UserError(str(error)) from error
    return new


def _regrouped(text: str, name: str) -> str:
    facts = tomllib.loads(text)
    bare = to_patch(name, {key: value for key, value in facts.items() if key not in ("variant", "companion")})
    if not facts.get("variant") or not all(variant.get("releases") for variant in facts["variant"]):
        raise UserError(f'patch {name}: it needs a [[variant]], and each one its releases, such as ["0.32.0"]')
    tops = dict.fromkeys(module_of(call).partition(".")[0] for call in bare.calls)
    companions = [top for top in tops if top != bare.package]
    listed = [release for variant in facts.get("variant", []) for release in variant["releases"]]
    asked = [(bare.package, release) for release in listed]
    asked += [(package, pin.version) for package in companions for pin in registry.pins(package)]
    fingerprints = cache.Fingerprints(None)

    def code(package: str, release: str) -> Code:
        tree = published.tree(package, release)
        found = installed.look(bare, tree, fingerprints.of_names).code
        own = [one for one in bare.names if (module_of(one).partition(".")[0] in companions) == (package in companions)]
        return {one: digest for one in own if (digest := found[one]) is not None}

    with ThreadPoolExecutor() as pool:
        codes = dict(zip(asked, pool.map(lambda one: code(*one), asked), strict=True))
    above, _, _ = text[: text.index("\n[[variant]]\n")].partition("\n[code]\n")
    forms = [
        (kept, group, one)
        for kept, releases in _kept_lines(text)
        for group, one in _grouped({release: codes[bare.package, release] for release in releases})
    ]
    common = _common([one for _, _, one in forms])
    tables = [_table("variant", kept, group, bare.names, one, common) for kept, group, one in forms]
    for package in companions:
        groups = list(_grouped({pin.version: codes[package, pin.version] for pin in registry.pins(package)}))
        shared = _common([one for _, one in groups if one])
        for group, one in groups:
            kept = [f'package = "{package}"', *([] if one else ['verdict = "not-present"'])]
            tables.append(_table("companion", kept, group, bare.names, one, shared if one else {}))
        common |= shared
    shown = ["[code]", *_lines({name: common[name] for name in bare.names if name in common})] if common else []
    return "\n".join([above.rstrip("\n") + "\n", *(["\n".join(shown) + "\n"] if shown else []), *tables])


def _kept_lines(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Each variant's lines but for its releases and code, and its releases."""
    for segment in catalogue_edits.VARIANT.finditer(text):
        if segment.group().startswith("[[variant]]"):
            above = segment.group().partition("[variant.code]")[0]
            lines = catalogue_edits.RELEASES.sub("", above).splitlines()[1:]
            releases = tomllib.loads(segment.group())["variant"][0]["releases"]
            yield [line for line in lines if line.strip()], releases


def _grouped(codes: Mapping[str, Code]) -> Iterator[tuple[list[str], Code]]:
    """Releases that have one code, in the order of the first of each group."""
    groups: list[tuple[list[str], Code]] = []
    for release, code in codes.items():
        for releases, known in groups:
            if known == code:
                releases.append(release)
                break
        else:
            groups.append(([release], code))
    yield from groups


def _common(codes: list[Code]) -> Code:
    """What several have, where saying it once, and of the others that they have it not, takes fewer lines."""
    common: Code = {}
    for name in dict.fromkeys(name for code in codes for name in code):
        most, count = Counter(code[name] for code in codes if name in code).most_common(1)[0]
        if 1 + len(codes) - count < sum(name in code for code in codes):
            common[name] = most
    return common


def _table(kind: str, kept: list[str], releases: list[str], names: Sequence[str], code: Code, common: Code) -> str:
    listed = ", ".join(f'"{release}"' for release in releases)
    own = {name: code.get(name, "") for name in names if code.get(name, "") != common.get(name, "")}
    return "\n".join([f"[[{kind}]]", f"releases = [{listed}]", *kept, f"[{kind}.code]", *_lines(own)]) + "\n"


def _lines(code: Code) -> list[str]:
    return [f'"{name}" = "{digest}"' for name, digest in code.items()]


def names_of(patch: Patch) -> list[str]:
    """The names of a patch that no release has: a slip, most likely."""
    forms = [form for package in patch.packages for form in patch.forms(package)]
    return [name for name in patch.names if not any(name in form.code for form in forms)]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Patches of this checkout.")]) -> None:
    """Fill in the variants of these patches, and their fingerprints, for the releases that each patch.toml lists."""
    folders = {versions.name_of(folder): folder for folder in versions.folders()}
    files = {name: folders[name] / "patch.toml" for name in [naming.known(folders, name) for name in names]}
    texts = {name: regrouped(catalogue_edits.read(file), name) for name, file in files.items()}
    for name, text in texts.items():
        releases_file.write(files[name], text)
        patch = to_patch(name, tomllib.loads(text))
        print(f"{name}: {len(patch.variants)} variants; in no release: {', '.join(names_of(patch)) or 'none'}")


if __name__ == "__main__":
    ending.end_with(app, name="regroup", bare=())
