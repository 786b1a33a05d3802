"""The command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.tools import bundle, catalogue, extensions, monitor, pages, pairs, placing, published
from vllm_livepatch.tools import check as checking
from vllm_livepatch.tools import from_diff as diffing
from vllm_livepatch.tools import matrix as matrices
from vllm_livepatch.tools.bundled import status as statuses
from vllm_livepatch.tools.bundled import verifying
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.sources import SourcesError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
PatchNames = Annotated[list[str] | None, typer.Option("--patch", metavar="NAME", help="Only this patch; repeatable.")]
PatchDirs = Annotated[
    list[Path] | None, typer.Option("--patch-dir", metavar="DIR", help="A directory of your own patches; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]


@app.command()
def generate(
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The bundle's directory.")] = None,
    patch: PatchNames = None,
    patch_dir: PatchDirs = None,
    zip_file: Annotated[Path | None, typer.Option("--zip", metavar="FILE", help="The bundle as one file.")] = None,
    python: Annotated[
        list[str] | None, typer.Option("--python", metavar="X.Y", help="wrapt's compiled form for it; repeatable.")
    ] = None,
    arch: Annotated[
        list[str] | None, typer.Option("--arch", metavar="A", help="x86_64 or aarch64; repeatable. Default: all.")
    ] = None,
) -> None:
    """Write a self-contained bundle. PYTHONPATH=DIR (or FILE) is all that a process needs."""
    if out is None and zip_file is None:
        raise UserError("name a directory with --out, or a file with --zip")
    entries = catalogue.choose(catalogue.load(patch_dir or ()), patch or ())
    files = bundle.contents(entries, extensions.gathered(extensions.chosen(python or (), arch or ()), published.say))
    if out is not None:
        placing.write_directory(files, out)
    if zip_file is not None:
        placing.write_zip(files, zip_file)
    for place in filter(None, (out, zip_file)):
        print(f"{place}: {len(files)} files, {len(entries)} patches ({', '.join(sorted(entries))})")
        print(f"  {bundle.digest(files)}")
        print(f'  export PYTHONPATH={shlex.quote(str(place.absolute()))}"${{PYTHONPATH:+:$PYTHONPATH}}"')


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="After --: the command and its words.")],
    patch: PatchNames = None,
    patch_dir: PatchDirs = None,
) -> NoReturn:
    """Run COMMAND with the bundle injected, its children included."""
    entries = catalogue.choose(catalogue.load(patch_dir or ()), patch or ())
    place = bundle.cached(bundle.contents(entries, extensions.at_hand(extensions.chosen())))
    before = os.environ.get("PYTHONPATH")
    environ = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{before}" if before else str(place)}
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run: {error.strerror}") from error


@app.command("list")
def list_patches(patch_dir: PatchDirs = None, as_json: AsJson = False) -> None:
    """The catalogue."""
    entries = catalogue.load(patch_dir or ())
    if as_json:
        _print_json([pages.summary(entry.patch) for entry in entries.values()])
    else:
        Console().print(pages.catalogue_table(entry.patch for entry in entries.values()))


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME")], patch_dir: PatchDirs = None, as_json: AsJson = False
) -> None:
    """One patch: why, origin, upstream state, releases, options."""
    entry = catalogue.choose(catalogue.load(patch_dir or ()), [name])[name]
    if as_json:
        _print_json({"name": name, **entry.facts})
    else:
        pages.print_page(Console(), entry.patch)


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
    diff: Annotated[bool, typer.Option(help="Fetch and show what drifted.")] = True,
    patch_dir: PatchDirs = None,
    as_json: AsJson = False,
) -> None:
    """Every patch's verdict for what is installed, or was published, without importing it.

    Exit 1 where a needed one could not apply, and where vLLM and LMCache do not fit together.
    """
    if python is not None and site_packages is not None:
        raise UserError("--python and --site-packages exclude each other")
    if index_url is not None:
        os.environ["PIP_INDEX_URL"] = index_url
    entries = catalogue.load(patch_dir or ())
    patches = [entry.patch for entry in entries.values()]
    others = checking.released(release or (), wheel or (), patches)
    tree: installed.Tree | None = None
    if site_packages is not None:
        tree = checking.directory_tree(site_packages)
    elif python is not None or not others:
        wanted = {package for patch in patches for package in patch.packages}
        tree = checking.interpreter_tree(python or sys.executable, sorted(wanted))
    else:
        patches = [patch for patch in patches if patch.package in others]
    tree = checking.Several(tree, others) if others or tree is None else tree
    changes = {patch.name: entries[patch.name].changes() for patch in patches}
    packages, answers = checking.check(patches, tree, changes)
    for name in others.keys() - packages.keys() - {"torch"}:
        packages[name] = installed.release(name, tree)
    if diff:
        answers = checking.explained(answers, tree, others)
    pair = pairs.of_tree(tree)
    if as_json:
        judged = {"patches": [answer.described() for answer in answers], "pairs": [pair.described()] if pair else []}
        _print_json({"packages": packages, **judged})
    else:
        pages.print_check(Console(), packages, answers)
        if pair:
            pairs.print_pair(Console(soft_wrap=True), pair)
    if any(answer.blocked for answer in answers) or (pair and pair.broken):
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
    require: Annotated[
        list[str] | None,
        typer.Option("--require", metavar="PATCH", help="Exit 1 unless all processes have it; repeatable."),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove the reports of processes that have ended.")] = False,
    prometheus: Annotated[
        Path | None, typer.Option("--prometheus", metavar="FILE", help="Write metrics for node_exporter's textfiles.")
    ] = None,
    serve: Annotated[int | None, typer.Option("--serve", metavar="PORT", help="Answer Prometheus' scrapes.")] = None,
    address: Annotated[str, typer.Option("--address", help="Where --serve listens.")] = "127.0.0.1",
) -> None:
    """Every live patched process: releases, patches, state, reason, targets, counters."""
    code = monitor.run(
        statuses.state_directory(state_dir),
        as_json=as_json,
        watch=watch,
        summary=summary,
        require=require or (),
        prune=prune,
        prometheus=prometheus,
        serve=serve,
        address=address,
    )
    raise typer.Exit(code)


@app.command("from-diff")
def from_diff(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A unified diff, or - for standard input.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The patch's: small letters, digits, hyphens.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the patch's folder goes.")],
    include: Annotated[list[str] | None, typer.Option("--include", metavar="GLOB", help="Only such files.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="No such files.")] = None,
    origin: Annotated[str, typer.Option("--origin", metavar="TEXT", help="Where it comes from, for people.")] = "",
) -> None:
    """A unified diff becomes a patch folder, judged against every pinned release. Exit 1 where it applies to none."""
    tell = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
    data = diffing.read(file)
    outcome = diffing.make(
        data,
        name,
        out,
        include or (),
        exclude or (),
        origin or ("standard input" if file == "-" else Path(file).name),
        tell,
    )
    diffing.show(outcome, Console())
    if outcome.folder is None:
        raise typer.Exit(1)


@app.command()
def verify(
    place: Annotated[Path, typer.Argument(metavar="DIR")],
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="sha256:HEX", help="What `generate` printed.")
    ] = None,
) -> None:
    """The bundle is what `generate` wrote. Exit 1 where it is not, 2 where there is none."""
    if digest is not None and not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        raise UserError(f"--digest {digest} is not sha256: and 64 hexadecimal digits, as `generate` prints it")
    found = verifying.verified(place, digest)
    for difference in found.differences:
        print(difference)
    if found.differences:
        raise typer.Exit(1)
    print(f"{place}: {found.compared} files, all as written, {found.digest}")


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def lab(context: typer.Context) -> None:
    """A real topology on this machine, with load and faults: see `lab --help`."""
    try:
        from vllm_livepatch.tools.lab.command import command
    except ImportError as error:
        raise UserError(f"the lab needs more packages (pip install 'vllm-livepatch[lab]'): {error}") from error
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command("lab")(command)
    code = inner(context.args, prog_name="vllm-livepatch lab", standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def main() -> NoReturn:
    """Run the command line."""
    end_with(app)


def end_with(app: typer.Typer, name: str = "vllm-livepatch", bare: Sequence[str] = ("--help",)) -> NoReturn:
    """Run a command line to the process's end; bad input is one line on stderr, of ``name``, and exit 2.

    ``bare`` is what it does when nothing is said.
    """
    try:
        code = app(sys.argv[1:] or list(bare), standalone_mode=False)
    except (UserError, SourcesError) as error:
        _fail(name, str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        # click's errors, wherever this release of typer keeps its click.
        formatted = getattr(error, "format_message", None)
        if formatted is None:
            if type(error).__name__ == "Abort":
                sys.exit(130)
            raise
        _fail(name, formatted() or "see --help")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(name: str, message: str) -> NoReturn:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
