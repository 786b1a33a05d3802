"""Mutation tests of what runs in patched processes: `docs/mutation.md`.

python -m vllm_livepatch.tools.upkeep.mutation run sitecustomize/settings.py        # all its mutants
python -m vllm_livepatch.tools.upkeep.mutation run --sample 40 --seed 1 'patches/*/wrappers.py'
python -m vllm_livepatch.tools.upkeep.mutation run --again sitecustomize/settings.py    # those that survived, once more
python -m vllm_livepatch.tools.upkeep.mutation report
"""

from __future__ import annotations

import ast
import datetime
import fnmatch
import hashlib
import json
import queue
import random
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_livepatch.tools import comments
from vllm_livepatch.tools.commands import ending
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.toml import tomllib
from vllm_livepatch.tools.upkeep import mutation_reach, mutation_report
from vllm_livepatch.tools.upkeep.mutation_copy import Copy

CHECKOUT = Path(__file__).resolve().parents[2]
KEPT = CHECKOUT / "docs" / "mutation"
PAGE = CHECKOUT / "docs" / "mutation.md"
CONFIG = Path(__file__).with_name("mutation.toml")
RECORDING = 3600.0  # seconds, for all tests of a group
RELEASE_TEST = 15.0  # seconds, for one, of which the limit is made

Work = queue.SimpleQueue["tuple[str, Mutant]"]


@dataclass(frozen=True)
class Mutant:
    """One change: the operator's n-th possible place in the module, and what the changed module reads."""

    operator: str
    occurrence: int
    line: int
    was: str
    now: str
    text: str

    @property
    def key(self) -> tuple[str, int]:
        return self.operator, self.occurrence


def mutants(text: str, operators: Sequence[str]) -> list[Mutant]:
    """The mutants of a module that compile and change what is evaluated."""
    from cosmic_ray import ast as trees
    from cosmic_ray import mutating, plugins

    outside = unevaluated(text)
    tree = trees.get_ast(text)
    found = []
    for name in operators:
        operator = plugins.get_operator(f"core/{name}")()
        places = [place for node in trees.ast_nodes(tree) for place in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(places):
            if any(first <= start < last for first, last in outside):
                continue
            try:
                changed = mutating.mutate_code(text, operator, occurrence)
            except AttributeError:  # Cosmic Ray replaces only plain names of exceptions, no `module.Error`
                continue
            if changed and changed != text and compiles(changed):
                found.append(Mutant(name, occurrence, *difference(text, changed, start[0]), changed))
    return sorted(found, key=lambda one: (one.line, one.operator, one.occurrence))


def unevaluated(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations stand that nothing evaluates."""
    if "from __future__ import annotations" not in text:
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for part in parts:
            if isinstance(part, ast.expr):
                end = (part.end_lineno or part.lineno, part.end_col_offset or part.col_offset)
                found.append(((part.lineno, part.col_offset), end))
    return found


def compiles(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(text, "mutant", "exec")
        except SyntaxError:
            return False
    return True


def difference(text: str, changed: str, line: int) -> tuple[int, str, str]:
    """The first line that differs, and what it read before and reads now."""
    lines = list(zip(text.splitlines(), changed.splitlines(), strict=False))
    for number, (before, after) in enumerate(lines, 1):
        if before != after:
            return number, before.strip(), after.strip()
    return line, text.splitlines()[line - 1].strip(), ""


def drawn(possible: Sequence[Mutant], sample: int | None, seed: int) -> list[Mutant]:
    """All, or as many as were asked for, by the seed."""
    if sample is None or sample >= len(possible):
        return list(possible)
    return sorted(random.Random(seed).sample(list(possible), sample), key=lambda one: one.line)


def digest(text: str) -> str:
    """Of a module's code: comments and docstrings may change."""
    return hashlib.sha256(comments.left_out(text).encode()).hexdigest()


def changed(kept: Iterable[Mapping[str, Any]], checkout: Path) -> list[str]:
    """The modules whose code is not the code that was measured; also those that are gone."""
    files = {str(one["module"]): (checkout / str(one["module"]), one["sha256"]) for one in kept}
    return sorted(
        name for name, (file, was) in files.items() if not file.is_file() or digest(file.read_text("utf-8")) != was
    )


class Kept:
    """What is known of a module's mutants, in one file of JSON."""

    def __init__(self, place: Path, module: str, text: str, possible: int) -> None:
        self.file = place / (module.removesuffix(".py").replace("/", ".") + ".json")
        now = digest(text)
        old = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        self.found: dict[tuple[str, int], dict[str, Any]] = {}
        if old.get("sha256") == now:
            self.found = {(one["operator"], one["occurrence"]): one for one in old["mutants"]}
        self.head = {"module": module, "sha256": now, "possible": possible}

    def draw(self, key: tuple[str, int]) -> int | None:
        """Which draw this mutant is of, None where it was not run yet."""
        return int(self.found[key].get("draw", 1)) if key in self.found else None

    def add(self, mutant: Mutant, outcome: str, by: str | None, since: bool = False, draw: int = 1) -> None:
        """`since`: one that survived, of which only what tests written for it come to is added; its outcome stays."""
        names = ("operator", "occurrence", "line", "was", "now")
        found = {**{name: getattr(mutant, name) for name in names}, "outcome": outcome, "by": by}
        if draw != 1:
            found["draw"] = draw
        self.found[mutant.key] = {**self.found[mutant.key], "since": by or outcome} if since else found
        ordered = sorted(self.found.values(), key=lambda one: (one["line"], one["operator"], one["occurrence"]))
        content = {**self.head, "date": datetime.date.today().isoformat(), "mutants": ordered}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


class Run:
    """Mutants of several modules, run in several copies."""

    def __init__(self, config: Mapping[str, Any], texts: Mapping[str, str], kept: Mapping[str, Kept]) -> None:
        self.config, self.texts, self.kept = config, texts, kept
        self.tests: dict[str, dict[str, Any]] = {}
        self.unchanged: dict[str, bool] = {}
        self.lock = threading.Lock()

    def record(self, copies: Sequence[Copy], files: Sequence[str], texts: Mapping[str, str], keep: Path | None) -> None:
        """Which tests of these files execute which function of these modules, but for the files that are in `keep`."""
        known: dict[str, dict[str, Any]] = json.loads(keep.read_text("utf-8")) if keep and keep.exists() else {}
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for file in sorted(files, key=lambda file: -(CHECKOUT / file).stat().st_size):
            if file not in known:
                waiting.put(file)

        def work(copy: Copy) -> None:
            for module, text in texts.items():
                copy.write(module, mutation_reach.instrumented(text, module, str(copy.probes)))
            while True:
                try:
                    file = waiting.get_nowait()
                except queue.Empty:
                    break
                found = copy.run([file], RECORDING, record=True)["tests"]
                with self.lock:
                    known[file] = found
                    if keep:
                        keep.write_text(json.dumps(known), "utf-8")
            for module, text in texts.items():
                copy.write(module, text)

        if not waiting.empty():
            _together(work, copies)
        slowest = self.config["slowest"]
        for tests in known.values():
            self.tests.update({name: one for name, one in tests.items() if one["seconds"] <= slowest})

    def stages(self, module: str, line: int) -> Iterator[list[str]]:
        """The tests for a change of this line: unit tests first, and a patch's release tests for what survives them."""
        yield mutation_reach.reaching(self.tests, self.texts[module], module, line, self.config["seconds"])
        yield self.config.get("releases", {}).get(Path(module).parent.name, [])

    def outcome(self, copy: Copy, module: str, mutant: Mutant) -> tuple[str, str | None]:
        for wanted in self.stages(module, mutant.line):
            while tests := [name for name in wanted if self.unchanged.get(name, True)]:
                limit = 4 * sum(self.seconds(name) for name in tests) + 10
                copy.write(module, mutant.text)
                try:
                    answer = copy.run(["-x", *tests], limit)
                finally:
                    copy.write(module, self.texts[module])
                if answer["code"] is None:
                    return "timeout", None
                if not answer["code"]:
                    break
                failed = [name for name, one in answer["tests"].items() if not one["passed"]]
                if not failed:  # pytest could not import it
                    return "killed", None
                if self.passes(copy, failed[0]):
                    return "killed", failed[0]
        return "survived", None

    def seconds(self, test: str) -> float:
        return float(self.tests[test]["seconds"]) if test in self.tests else RELEASE_TEST

    def passes(self, copy: Copy, test: str) -> bool:
        """Whether this test passes without a change; else it is not asked any more."""
        if test not in self.unchanged:
            answer = copy.run([test], 4 * self.seconds(test) + 60)
            self.unchanged[test] = answer["code"] == 0
        return self.unchanged[test]

    def run(self, copies: Sequence[Copy], work: Work) -> None:
        def worker(copy: Copy) -> None:
            while True:
                try:
                    module, mutant = work.get_nowait()
                except queue.Empty:
                    return
                outcome, by = self.outcome(copy, module, mutant)
                with self.lock:
                    self.kept[module].add(
                        mutant, outcome, by, self.config.get("since", False), self.config.get("draw", 1)
                    )
                if outcome == "survived":
                    typer.echo(f"survived {module}:{mutant.line}: {mutant.was}  ->  {mutant.now}")

        _together(worker, copies)


def _together(work: Any, copies: Sequence[Copy]) -> None:
    failed: list[BaseException] = []

    def guarded(copy: Copy) -> None:
        try:
            work(copy)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def modules(wanted: Sequence[str], config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The modules that are asked for, each with its group."""
    for group in config["group"]:
        for pattern in group["modules"]:
            for file in sorted(CHECKOUT.glob(pattern)):
                name = file.relative_to(CHECKOUT).as_posix()
                if any(fnmatch.fnmatch(name, one) for one in wanted):
                    yield name, group


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    wanted: Annotated[list[str], typer.Argument(metavar="MODULE", help="paths, or patterns of them")],
    sample: Annotated[int | None, typer.Option(help="As many mutants of each module, not all.")] = None,
    seed: Annotated[int, typer.Option(help="What the sample is drawn by.")] = 1,
    draw: Annotated[
        int, typer.Option(help="The number of the draw that these are of. What is of another is not drawn again.")
    ] = 1,
    jobs: Annotated[int, typer.Option("--jobs", "-n", help="Copies at a time.")] = 2,
    again: Annotated[bool, typer.Option(help="Those that survived, once more.")] = False,
    since: Annotated[
        bool, typer.Option(help="Those that no test is known to notice since: their outcome, and so the share, stays.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="The tests of one mutant, added up; else as configured.")
    ] = None,
    tests: Annotated[Path | None, typer.Option(help="Keeps here which test executes what, and reads it.")] = None,
    place: Annotated[Path, typer.Option(help="Where results are kept.")] = KEPT,
) -> None:
    """Run mutants of these modules, but for those whose outcome is kept."""
    config = tomllib.loads(CONFIG.read_text("utf-8"))
    config["seconds"] = seconds or config["seconds"]
    config["since"], config["draw"], again = since, draw, again or since
    found = list(modules(wanted, config))
    if not found:
        raise UserError(f"no module of tools/upkeep/mutation.toml is {' or '.join(wanted)}")
    texts = {module: (CHECKOUT / module).read_text("utf-8") for module, _ in found}
    kept: dict[str, Kept] = {}
    wanting: list[tuple[str, Mutant]] = []
    for module, text in texts.items():
        possible = mutants(text, config["operators"])
        kept[module] = known = Kept(place, module, text, len(possible))
        survived = {key for key, one in known.found.items() if one["outcome"] == "survived"}
        if since:
            reasons = config.get("equivalent", [])
            survived = {key for key in survived if not mutation_report.reason(module, known.found[key], reasons)}
            survived = {key for key in survived if known.found[key].get("since", "survived") == "survived"}
        else:
            survived = {key for key in survived if known.draw(key) == draw}
        free = [mutant for mutant in possible if known.draw(mutant.key) in (None, draw)]
        for mutant in drawn(free, sample, seed) if not again else possible:
            if mutant.key in survived if again else mutant.key not in known.found:
                wanting.append((module, mutant))
    # By the seed, so that a run that is ended early has a sample, and not the first lines.
    random.Random(seed).shuffle(wanting)
    work: Work = queue.SimpleQueue()
    for one in wanting:
        work.put(one)
    typer.echo(f"{len(wanting)} mutants to run")
    files = sorted({f"tests/unit/test_{name}.py" for _, group in found for name in group["tests"]})
    with tempfile.TemporaryDirectory() as scratch:
        copies = [Copy(CHECKOUT, Path(scratch) / str(number)) for number in range(jobs)]
        try:
            running = Run(config, texts, kept)
            places = {file for _, group in found for pattern in group["modules"] for file in CHECKOUT.glob(pattern)}
            whole = {file.relative_to(CHECKOUT).as_posix(): file.read_text("utf-8") for file in places}
            running.record(copies, files, whole, tests)
            running.run(copies, work)
        finally:
            for copy in copies:
                copy.close()
    outcomes = Counter(one["outcome"] for known in kept.values() for one in known.found.values())
    typer.echo(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))


@app.command()
def report(
    place: Annotated[Path, typer.Option(help="Where results are kept.")] = KEPT,
    write: Annotated[Path, typer.Option(help="The page.")] = PAGE,
) -> None:
    """Write the page from what is kept."""
    kept = [json.loads(file.read_text("utf-8")) for file in sorted(place.glob("*.json"))]
    config = tomllib.loads(CONFIG.read_text("utf-8"))
    since = changed(kept, CHECKOUT)
    page = mutation_report.page(kept, config.get("equivalent", []), config.get("draw", []), since)
    write.write_text(page, "utf-8")


if __name__ == "__main__":
    ending.end_with(app, name="mutation")
