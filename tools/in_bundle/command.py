"""`python BUNDLE doctor|status|verify|check`: what a container answers that has the bundle and nothing else of ours."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...sitecustomize.decision import Patch
from ...sitecustomize.redaction import sentence
from ..errors import UserError
from . import doctor, grouping, status, summary, verdicts
from .verifying import check_digest, verified


def main(place: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command of the bundle at `place` to the process's end. Bad input is one line on stderr, and exit 2."""
    if sys.stdout is None:  # closed by who started it
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    options = _parser().parse_args(arguments)
    options.place = place
    try:
        code = options.command(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"vllm-livepatch: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # piped into head, and watching: nobody does any more
        drop_output()
        sys.exit(0)
    except OSError as error:
        drop_output()
        print(f"vllm-livepatch: {named(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code)


def drop_output() -> None:
    """Nobody takes what was printed: what is left of it is not tried again when the interpreter ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str, end: str = "\n") -> None:
    """Print it. Where nobody takes it (piped into head), the exit code is still asked for."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        drop_output()


def named(error: OSError) -> str:
    """What failed, and the file; of an address, no password."""
    return sentence(": ".join(str(part) for part in (error.filename, error.strerror or error) if part is not None))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python BUNDLE", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command, purpose in (
        (_doctor, "whether this interpreter, as it is started here, would be patched; exit 1 where not"),
        (_status, "every live patched process; with --require, exit 1 where a patch is missing"),
        (_verify, "whether this bundle is what `generate` wrote; exit 1 where not"),
        (_check, "every patch's verdict for what is installed here; exit 1 where a needed one could not apply"),
    ):
        one = commands.add_parser(command.__name__.strip("_"), help=purpose, description=purpose, allow_abbrev=False)
        one.add_argument("--json", action="store_true", help="for scripts")
        one.set_defaults(command=command)
        if command is _verify:
            one.add_argument("--digest", metavar="sha256:HEX", help="the bundle's, as `generate` printed it")
        if command is _status:
            one.add_argument("--state-dir", type=Path, metavar="DIR", help="where the reports are")
            one.add_argument("--watch", action="store_true", help="look again every second, until Ctrl-C")
            one.add_argument("--summary", action="store_true", help="all processes together, in one screen")
            one.add_argument("--all", action="store_true", help="each of many processes with all its patches")
            one.add_argument(
                "--require",
                action="append",
                default=[],
                metavar="PATCH[@VERSION]",
                help="has to be applied everywhere, at least of this version; repeatable",
            )
            one.add_argument("--digest", metavar="sha256:HEX", help="of the bundle that every process has to run")
            one.add_argument("--prune", action="store_true", help="remove the reports of processes that have ended")
            one.add_argument(
                "--forget",
                action="append",
                default=[],
                metavar="HOST",
                help="remove the reports of its processes that are silent; repeatable, '*' for any host",
            )
    return parser


def _doctor(options: argparse.Namespace) -> int:
    found = verdicts.catalogue()
    diagnosis = doctor.examine(options.place, found)
    failed = diagnosis.failed
    if options.json:
        _print_json(
            {
                "patched": not failed,
                "bundle": options.place,
                "version": found.version,
                "digest": diagnosis.digest,
                "python": sys.executable,
                "checks": [check._asdict() for check in diagnosis.checks],
                "packages": diagnosis.packages,
                "patches": [answer.described() for answer in diagnosis.patches],
            }
        )
        return 1 if failed else 0
    for check in diagnosis.checks:
        say(f"{check.result:8} {check.name}: {check.message}")
    if failed:
        say(f"not fit to be patched: {'; '.join(dict.fromkeys(check.name for check in failed))}")
        return 1
    say("processes that are started like this one are patched")
    return 0


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked of a state directory. `patches` are those that are known here."""

    as_json: bool = False
    summary: bool = False
    everything: bool = False
    require: Sequence[str] = ()
    digest: str | None = None
    prune: bool = False
    forget: Sequence[str] = ()
    patches: Sequence[Patch] = ()

    @property
    def decides(self) -> bool:
        """Whether something is required, so that the exit code is an answer."""
        return bool(self.require or self.digest)


def _status(options: argparse.Namespace) -> int:
    asked = Asked(
        as_json=options.json,
        summary=options.summary,
        everything=options.all,
        require=options.require,
        digest=options.digest,
        prune=options.prune,
        forget=options.forget,
        patches=verdicts.catalogue().patches if options.require else (),
    )
    directory = status.state_directory(options.state_dir, asked.decides)
    if options.watch:
        watch(directory, asked)
    return show_status(directory, asked, lambda reports: say(_text(reports, asked)))


def watch(directory: Path, asked: Asked) -> NoReturn:
    """Print what the state directory holds, each second, to the process's end. JSON is a line each time."""
    check_digest(asked.digest)
    while True:
        print(_text(status.read(directory), asked, indent=None), flush=True)
        time.sleep(1)


def show_status(directory: Path, asked: Asked, show: Callable[[status.Reports], None]) -> int:
    """Print what is asked of the state directory: the exit code. `show` prints the processes. Raises UserError.

    Where something is required, the answer is the first line, and of the processes only what each lacks is printed.
    """
    check_digest(asked.digest)
    reports = status.read(directory)
    required = status.requirements(reports, asked.require, asked.patches)
    reports, forgotten = status.forget(reports, asked.forget)
    if asked.decides and not asked.as_json:
        say(status.answer(reports, required, asked.digest))
    if asked.as_json or asked.summary:
        say(_text(reports, asked))
    elif not asked.decides:
        show(reports)
    complain(forgotten)
    return settled(reports, required, asked)


def _text(reports: status.Reports, asked: Asked, indent: int | None = 1) -> str:
    if asked.as_json:
        return json.dumps(summary.summary(reports) if asked.summary else reports.live, indent=indent)
    if asked.summary:
        return summary.summary_text(summary.summary(reports))
    return summary.processes_text(reports, asked.everything)


def settled(reports: status.Reports, required: Sequence[status.Required], asked: Asked) -> int:
    """Prune and require, as asked, with what is to be said of it on stderr: the exit code."""
    if asked.prune:
        gone = status.prune(reports)
        ended = f"removed the reports of {len(gone)} ended processes: {', '.join(map(str, gone)) or '-'}"
        print(ended, file=sys.stderr)
    lacking = status.unmet(reports, required, asked.digest) if asked.decides else []
    if lacking:
        complain(lacking if asked.everything else summary.first(lacking))
    else:
        complain([*filter(None, [status.unread(reports)]), *status.idle(reports, required, asked.patches)])
    return 1 if lacking else 0


def complain(sentences: Iterable[str]) -> None:
    """Say them on stderr, a line each."""
    for sentence_ in sentences:
        print(f"vllm-livepatch: {sentence_}", file=sys.stderr)


def _verify(options: argparse.Namespace) -> int:
    found = verified(Path(options.place), options.digest)
    if options.json:
        answer = {
            "digest": found.digest,
            "files": found.compared,
            "differences": found.differences,
            "not_compared": found.foreign,
        }
        _print_json({"bundle": options.place, **answer})
    else:
        as_written = f"{options.place}: the {found.compared} files of its manifest are all as written, {found.digest}"
        say("\n".join(found.differences) or as_written)
    if found.caution:
        print(f"vllm-livepatch: {found.caution}", file=sys.stderr)
    return 1 if found.differences else 0


def _check(options: argparse.Namespace) -> int:
    found = verdicts.catalogue()
    packages, judged = verdicts.here(found)
    unusable = verdicts.unusable(found.patches, os.environ)
    if options.json:
        _print_json({"packages": packages, "patches": [answer.described() for answer in judged]})
    else:
        releases = (f"{name} {release or 'of unknown release'}" for name, release in packages.items())
        say(f"checked: {', '.join(releases) or 'none of the packages that these patches are for'}")
        rows: list[tuple[str, ...]] = [("patch", "verdict", "applies", "why")]
        for heading, some in grouping.titled(judged, lambda answer: answer.patch):
            rows += [("", "", "", ""), (f"{heading}:", "", "", "")] if heading else []
            for answer in some:
                decision = answer.decision
                applies = "yes" if decision.apply else "no"
                rows.append((answer.patch.name, decision.verdict, applies, decision.detail))
        say("\n".join(summary.columns(rows)))
    for message in unusable:
        print(f"vllm-livepatch: {message}", file=sys.stderr)
    if not packages:
        return 2
    return 1 if any(answer.blocked for answer in judged) else 2 if unusable else 0


def _print_json(value: Any) -> None:
    say(json.dumps(value, indent=1))
