"""The command line."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from vllm_livepatch.tools import deploy as deploying
from vllm_livepatch.tools.bundles import (
    bundle,
    catalogue,
    displaced,
    extensions,
    guard_distribution,
    others,
    placing,
    replaced,
    shared,
)
from vllm_livepatch.tools.commands import (
    checking,
    diagnosing,
    ending,
    locking,
    monitor,
    proving,
    rendering,
    scaffold,
    waiting,
)
from vllm_livepatch.tools.commands import from_diff as diffing
from vllm_livepatch.tools.commands import matrix as matrices
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import command, verifying
from vllm_livepatch.tools.in_bundle import status as statuses
from vllm_livepatch.tools.in_bundle.naming import known
from vllm_livepatch.tools.proving import playing, proofs
from vllm_livepatch.tools.releases import published

app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


def _names(incomplete: str) -> list[str]:
    """For a shell that completes a patch's name."""
    typed = (name.replace("-", "_") if "_" in incomplete else name for name in catalogue.load())
    return [name for name in typed if name.startswith(incomplete)]


PatchNames = Annotated[
    list[str] | None,
    typer.Option("--patch", metavar="NAME", help="Only this patch; repeatable.", autocompletion=_names),
]
PatchDirs = Annotated[
    list[Path] | None, typer.Option("--patch-dir", metavar="DIR", help="A directory of your own patches; repeatable.")
]
Installed = Annotated[bool, typer.Option("--installed", help="Also the patches that installed distributions bring.")]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
Proofs = Annotated[
    Path | None, typer.Option("--proofs", metavar="FILE", help="What `prove --out` found: code it was proven on.")
]


def _places(patch_dir: list[Path] | None, installed: bool) -> list[Path]:
    """The directories of patch folders that are asked for. Raises UserError."""
    return [*(patch_dir or ()), *(others.installed() if installed else ())]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-livepatch {bundle.version()}")
        raise typer.Exit


@app.callback(help="Patches for vLLM and LMCache, applied as their modules are imported.")
def _options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Show it.")] = False,
) -> None:
    """The options that go before a command."""


@app.command()
def generate(
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The bundle's directory.")] = None,
    patch: PatchNames = None,
    patch_dir: PatchDirs = None,
    installed: Installed = False,
    merge: Annotated[
        list[Path] | None, typer.Option("--bundle", metavar="DIR", help="Also the patches of this bundle; repeatable.")
    ] = None,
    zip_file: Annotated[Path | None, typer.Option("--zip", metavar="FILE", help="The bundle as one file.")] = None,
    python: Annotated[
        list[str] | None, typer.Option("--python", metavar="X.Y", help="wrapt's compiled form for it; repeatable.")
    ] = None,
    arch: Annotated[
        list[str] | None, typer.Option("--arch", metavar="A", help="x86_64 or aarch64; repeatable. Default: all.")
    ] = None,
    proofs_file: Proofs = None,
    guard: Annotated[
        Path | None, typer.Option("--guard", metavar="DIR", help="A plugin of vLLM that notices a missing bundle.")
    ] = None,
) -> None:
    """Write a self-contained bundle. PYTHONPATH=DIR (or FILE) is all that a process needs."""
    if out is None and zip_file is None and guard is None:
        raise UserError("name a directory with --out or --guard, or a file with --zip")
    entries, left = others.merged(catalogue.load(_places(patch_dir, installed)), merge or ())
    entries = catalogue.choose(entries, patch or ())
    others.refuse_unlike(entries.values())
    if proofs_file is not None:
        entries = proofs.with_proofs(entries, proofs_file)
    for sentence in left:
        print(f"vllm-livepatch: {sentence}", file=sys.stderr)
    for warning in (*displaced.warnings(entries.values()), *shared.sentences(entries.values())):
        print(f"vllm-livepatch: warning: {warning}", file=sys.stderr)
    forms = extensions.chosen(python or (), arch or ())
    if not bundle.asks_for_wrapt(entries):
        forms = []
        if python or arch:
            print("vllm-livepatch: no patch asks for wrapt: --python and --arch change nothing", file=sys.stderr)
    files = bundle.contents(entries, extensions.gathered(forms, published.say) if forms else {})
    before = {place: replaced.lying_at(place) for place in filter(None, (out, zip_file))}
    if out is not None:
        placing.write_directory(files, out)
    if zip_file is not None:
        placing.write_zip(files, zip_file)
    for place, older in before.items():
        print(f"{place}: {len(files)} files, {len(entries)} patches ({', '.join(sorted(entries))})")
        print(f"  {bundle.digest(files)}")
        print(f'  export PYTHONPATH={shlex.quote(str(place.absolute()))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        for line in replaced.sentences(older, files, replaced.state_directory()) if older else ():
            print(f"  {line}")
    if guard is not None:
        guard_distribution.write(entries, guard)
        print(f"{guard}: vllm-livepatch-guard; where VLLM_PLUGINS is set, add livepatch to it")
        print(f"  pip install --no-index {shlex.quote(str(guard.absolute()))}")


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="After --: the command and its words.")],
    patch: PatchNames = None,
    patch_dir: PatchDirs = None,
) -> NoReturn:
    """Run COMMAND with the bundle injected, its children included."""
    entries = catalogue.choose(catalogue.load(patch_dir or ()), patch or ())
    forms = extensions.at_hand(extensions.chosen()) if bundle.asks_for_wrapt(entries) else {}
    place = bundle.cached(bundle.contents(entries, forms))
    before = os.environ.get("PYTHONPATH")
    environ = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{before}" if before else str(place)}
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        raise UserError(f"{words[0]} cannot be run: {error.strerror}") from error


@app.command("list")
def list_patches(patch_dir: PatchDirs = None, installed: Installed = False, as_json: AsJson = False) -> None:
    """The catalogue."""
    entries = catalogue.load(_places(patch_dir, installed))
    if as_json:
        _print_json([rendering.summary(entry.patch) for entry in entries.values()])
    else:
        Console().print(rendering.catalogue_table(entry.patch for entry in entries.values()))


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=_names)],
    patch_dir: PatchDirs = None,
    installed: Installed = False,
    as_json: AsJson = False,
) -> None:
    """One patch: why, origin, upstream state, releases, options."""
    entries = catalogue.load(_places(patch_dir, installed))
    entry = entries[known(entries, name)]
    if as_json:
        _print_json({"name": entry.patch.name, **entry.facts})
    else:
        rendering.print_page(Console(), entry.patch)


@app.command()
def check(
    release: Annotated[
        list[str] | None, typer.Option("--release", metavar="PKG==VERSION", help="A published release; repeatable.")
    ] = None,
    wheel: Annotated[list[Path] | None, typer.Option("--wheel", metavar="FILE", help="A wheel; repeatable.")] = None,
    python: Annotated[str | None, typer.Option("--python", metavar="PATH", help="An interpreter to ask.")] = None,
    site_packages: Annotated[
        Path | None, typer.Option("--site-packages", metavar="DIR", help="A directory, of an unpacked image's too.")
    ] = None,
    index_url: Annotated[
        str | None, typer.Option("--index-url", metavar="URL", help="The index to ask; pip's otherwise.")
    ] = None,
    diff: Annotated[bool, typer.Option(help="Fetch other releases to show what differs.")] = True,
    require: Annotated[
        list[str] | None,
        typer.Option("--require", metavar="NAME", help="Fail where this patch would not apply; repeatable."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="S", min=0.001, help="Give up after so many seconds.")
    ] = None,
    patch_dir: PatchDirs = None,
    installed: Installed = False,
    only: Annotated[bool, typer.Option("--only", help="Only the patches of --patch-dir, or --installed.")] = False,
    proofs_file: Proofs = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Each reason whole, and all code that was verified.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Every patch's verdict for what is installed, or was published, without importing it.

    Exit 1: a needed one could not apply, a required one would not, or vLLM and LMCache do not fit. Exit 2: neither is
    there, or a LIVEPATCH variable of this environment means nothing.
    """
    if index_url is not None:
        os.environ["PIP_INDEX_URL"] = index_url
    question = checking.Question(
        release or (),
        wheel or (),
        python,
        site_packages,
        diff,
        require or (),
        _places(patch_dir, installed),
        only,
        proofs_file,
    )
    with waiting.deadline(timeout), waiting.progress():
        answer = checking.find(question)
    checking.show(answer, as_json, verbose)
    if answer.code:
        raise typer.Exit(answer.code)


@app.command()
def prove(
    patch: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATCH", help="Only these; all otherwise.", autocompletion=_names),
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="The interpreter whose packages are looked at.")
    ] = None,
    site_packages: Annotated[
        Path | None, typer.Option("--site-packages", metavar="DIR", help="Packages to put before those of --python.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Keep it for generate --proofs.")] = None,
    require: Annotated[
        list[str] | None,
        typer.Option("--require", metavar="NAME", help="Fail where nothing stands for this patch; repeatable."),
    ] = None,
    patch_dir: PatchDirs = None,
    installed: Installed = False,
    only: Annotated[bool, typer.Option("--only", help="Only the patches of --patch-dir, or --installed.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.001, help="Longest time for one playing of a proof.")
    ] = playing.SECONDS,
    as_json: AsJson = False,
) -> None:
    """Run the patches' proofs on the installed code, as it is and patched. No GPU is needed.

    It prints a line for each patch. proven: the fault shows, and the patch mends it. no-fault: the code is right as it
    is. failed: the patched code is wrong. not-run: nothing was found out, and why. Exit 1: one failed, or nothing
    stands for one that was named. Exit 2: neither vLLM nor LMCache is there.
    """
    question = proving.Question(
        patch or (), python, site_packages, require or (), _places(patch_dir, installed), only, timeout, out
    )
    code = proving.run(question, as_json)
    if code:
        raise typer.Exit(code)


@app.command()
def lock(
    place: Annotated[
        Path, typer.Argument(metavar="DIR", help="A patch's folder (patch.toml, wrappers.py), or a directory of some.")
    ],
    release: Annotated[
        list[str] | None,
        typer.Option("--release", metavar="PKG==VERSION", help="A release more that the patch is for; repeatable."),
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="What is installed there, too.")
    ] = None,
    site_packages: Annotated[
        Path | None, typer.Option("--site-packages", metavar="DIR", help="What is installed there: a nightly, a fork.")
    ] = None,
) -> None:
    """Write patch.lock: the fingerprints of the code that a patch is for, on each release that it lists."""
    if python is not None and site_packages is not None:
        raise UserError("--python and --site-packages exclude each other")
    for folder in locking.folders(place):
        asked = locking.asked_for(folder, release or (), python, site_packages)
        for line in locking.lock(folder, asked):
            command.say(line)


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The patch's: small letters, digits, hyphens.")],
    target: Annotated[
        list[str], typer.Option("--target", metavar="MODULE:QUALNAME", help="What is to be wrapped; repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the patch's folder goes.")] = Path(),
    release: Annotated[
        str | None, typer.Option("--release", metavar="PKG==VERSION", help="Whose code it is; the newest otherwise.")
    ] = None,
    site_packages: Annotated[
        Path | None, typer.Option("--site-packages", metavar="DIR", help="What is installed there instead.")
    ] = None,
) -> None:
    """A patch's folder to begin with: patch.toml, and wrappers that change nothing. `lock` is next."""
    tree = checking.tree_of(target, release, site_packages)
    folder = scaffold.new(name, target, out, tree)
    command.say(f"{folder}: say in patch.toml what it is, in wrappers.py what it does, in proof.py what shows it; then")
    asked = f"--site-packages {site_packages}" if site_packages else f"--release {getattr(tree, 'version', 'VERSION')}"
    command.say(f"  vllm-livepatch lock {folder} {asked}")
    command.say(f"  vllm-livepatch ready {folder}")


@app.command()
def ready(place: Annotated[Path, typer.Argument(metavar="DIR", help="A patch's folder, or a directory.")]) -> None:
    """What a patch's folder still lacks before it can be shipped. Exit 1 where something is missing."""
    folders = locking.folders(place)
    own = {entry.patch.name: entry for entry in map(catalogue.read, folders)}
    catalogue.go_together({**catalogue.load(), **own}.values())
    found = {folder: scaffold.missing(folder) for folder in folders}
    for folder, lacking in found.items():
        for sentence in lacking or ["ready"]:
            command.say(f"{folder.name.replace('_', '-')}: {sentence}")
    if any(found.values()):
        raise typer.Exit(1)


@app.command()
def matrix(
    patch_dir: PatchDirs = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="For documentation.")] = False,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Put the Markdown between FILE's markers.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask the registry for releases that the data lacks.")
    ] = False,
) -> None:
    """Patches against all releases, and how each verdict is known: by execution, or by reading the code."""
    patches = [entry.patch for entry in catalogue.load(patch_dir or ()).values()]
    if refresh:
        for pin in matrices.refresh(dict.fromkeys(patch.package for patch in patches)):
            print(f"new, and read: {pin.package} {pin.version}", file=sys.stderr)
    found = matrices.make(patches)
    if write is not None:
        matrices.write(write, matrices.markdown(found))
    elif as_markdown:
        print(matrices.markdown(found), end="")
    elif as_json:
        _print_json(found.described())
    else:
        matrices.show(found, Console())


@app.command()
def status(
    state_dir: Annotated[Path | None, typer.Option("--state-dir", metavar="DIR")] = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second, until Ctrl-C.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="All processes together, in one screen.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Each of many processes with all its patches.")] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="PATCH[@VERSION]",
            help="Exit 1 unless all processes have it, or have not imported its target; repeatable.",
        ),
    ] = None,
    digest: Annotated[
        str | None,
        typer.Option("--digest", metavar="sha256:HEX", help="Exit 1 unless all processes run this bundle."),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove the reports of processes that have ended.")] = False,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            "--forget",
            metavar="HOST",
            help="Remove the reports of its processes that are silent; repeatable, '*' for any host.",
        ),
    ] = None,
    prometheus: Annotated[
        Path | None, typer.Option("--prometheus", metavar="FILE", help="Write metrics for node_exporter's textfiles.")
    ] = None,
    serve: Annotated[int | None, typer.Option("--serve", metavar="PORT", help="Answer Prometheus' scrapes.")] = None,
    address: Annotated[str, typer.Option("--address", help="Where --serve listens.")] = "127.0.0.1",
    patch_dir: PatchDirs = None,
) -> None:
    """Every live patched process: releases, patches, state, reason, targets, counters."""
    asked = command.Asked(
        as_json=as_json,
        summary=summary,
        everything=everything,
        require=require or (),
        digest=digest,
        prune=prune,
        forget=forget or (),
        patches=[entry.patch for entry in catalogue.load(patch_dir or ()).values()] if require else (),
    )
    directory = statuses.state_directory(state_dir, asked.decides)
    code = monitor.run(directory, asked, watch, prometheus, serve, address)
    raise typer.Exit(code)


@app.command("from-diff")
def from_diff(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A unified diff, or - for standard input.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The patch's: small letters, digits, hyphens.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the patch's folder goes.")],
    include: Annotated[list[str] | None, typer.Option("--include", metavar="GLOB", help="Only such files.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="No such files.")] = None,
    origin: Annotated[str, typer.Option("--origin", metavar="TEXT", help="Where it comes from, for people.")] = "",
    release: Annotated[
        list[str] | None,
        typer.Option("--release", metavar="VERSION", help="Judge it on this release alone; repeatable."),
    ] = None,
    site_packages: Annotated[
        Path | None,
        typer.Option("--site-packages", metavar="DIR", help="Judge it on what is installed there: a nightly."),
    ] = None,
    fixed: Annotated[
        list[str] | None,
        typer.Option("--fixed-upstream", metavar="VERSION", help="It has the change in another form; repeatable."),
    ] = None,
) -> None:
    """A unified diff becomes a patch folder, judged on every pinned release. Exit 1 where it applies to none.

    A folder that was made of a diff is made anew: what a person wrote into its patch.toml stays.
    """
    tell = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
    data = diffing.read(file)
    with waiting.progress():
        outcome = diffing.make(
            data,
            name,
            out,
            include or (),
            exclude or (),
            origin or ("standard input" if file == "-" else Path(file).name),
            tell,
            release or (),
            site_packages,
            fixed or (),
        )
    diffing.show(outcome, Console())
    if outcome.folder is None:
        raise typer.Exit(1)


@app.command()
def doctor(
    place: Annotated[
        Path | None, typer.Option("--bundle", metavar="DIR", help="The bundle; the first on PYTHONPATH otherwise.")
    ] = None,
    python: Annotated[str, typer.Option("--python", metavar="PATH", help="The engine's interpreter.")] = sys.executable,
    as_json: AsJson = False,
) -> None:
    """Whether an interpreter, as it is started here, would be patched, and why not. Exit 1 where it would not."""
    raise typer.Exit(diagnosing.run(place, python, as_json))


@app.command()
def verify(
    place: Annotated[Path, typer.Argument(metavar="DIR")],
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="sha256:HEX", help="What `generate` printed.")
    ] = None,
) -> None:
    """The bundle is what `generate` wrote. Exit 1 where it is not, 2 where there is none."""
    found = verifying.verified(place, digest)
    if found.caution:
        print(f"vllm-livepatch: {found.caution}", file=sys.stderr)
    if found.differences:
        command.say("\n".join(found.differences))
        raise typer.Exit(1)
    print(f"{place}: the {found.compared} files of its manifest are all as written, {found.digest}")


@app.command()
def deploy(
    form: Annotated[str, typer.Argument(metavar="FORM", help=f"One of: {', '.join(deploying.FORMS)}.")],
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="The engine's.")] = "vllm/vllm-openai:latest",
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="What is served.")] = "MODEL",
    bundle_image: Annotated[
        str, typer.Option("--bundle-image", metavar="IMAGE", help="The bundle's own, on Kubernetes.")
    ] = "",
    image_volume: Annotated[
        bool, typer.Option("--image-volume", help="Kubernetes mounts the bundle's image, and copies nothing.")
    ] = False,
) -> None:
    """Print what to paste so that an engine starts with the bundle."""
    print(deploying.text(form, image, model, bundle_image, image_volume), end="")


try:
    from vllm_livepatch.tools.lab.options import lab
except ImportError:

    @app.command("lab", context_settings={"ignore_unknown_options": True})
    def _no_lab(words: Annotated[list[str] | None, typer.Argument(metavar="TOPOLOGY", hidden=True)] = None) -> None:
        """A real topology on this machine. It comes with vllm-livepatch-lab, which is not installed."""
        raise UserError(
            f"the lab is a distribution of its own: pip install vllm-livepatch-lab=={bundle.version()} "
            "(in a checkout: pip install ./tools/lab)"
        )
else:
    app.command("lab")(lab)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def main() -> NoReturn:
    """Run the command line."""
    ending.end_with(app, prog_name="vllm-livepatch")


if __name__ == "__main__":
    main()
