"""The demo: a stock engine dies of clients that hang up; the same engine with the bundle on PYTHONPATH lives.

Both get the same prompts, the same load and the same hang-ups. Exit code 0 only if the stock engine died as expected
and the patched one met every condition; 1 otherwise; 2 for bad input.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import aiohttp
import typer
from rich.console import Console
from vllm_livepatch.tools import environments
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import model, report, topology
from vllm_livepatch.tools.lab.storm import Client, Load, RequestFailed, Tally, drained, storm, summary, warm
from vllm_livepatch.tools.lab.supervisor import PartFailed, Supervisor, tail, together

PATCH = "stale-finished-recving"
ASSERTION = ("_update_from_kv_xfer_finished", "assert req_id in self.requests", "AssertionError")
# 16 chunks of LMCache's and a rest, which is always computed.
PROMPT_TOKENS, PROMPTS = 16 * topology.CHUNK_SIZE + 28, 24
_LOG_PREFIX = re.compile(r"^\([^)]*\) (?:ERROR|INFO|WARNING) \S+ \S+ \[[^\]]*\] ?")
_SITE = re.compile(r'File ".*/site-packages/')
_ERROR = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback")
_PROGRESS_SECONDS = 15.0


@dataclass(frozen=True)
class Options:
    """``out`` is an existing directory."""

    out: Path
    seconds: float = 120.0
    calm: float = 5.0
    seed: int = 1
    patch_dirs: tuple[Path, ...] = ()
    """Directories of further patches for the bundle."""
    vllm: str = "0.32.0"
    lmcache: str = "0.5.6"


Say = Callable[[str], None]


async def run(options: Options) -> dict[str, Any]:
    """Run both sides and judge them; the result as it is written to ``result.json``.

    Raises ``PartFailed`` when a server does not come up, or dies where it must not.
    """
    begun = time.monotonic()
    say = _progress(begun)
    bundle, state = options.out / "bundle", options.out / "state"
    state.mkdir(exist_ok=True)
    further = [word for place in options.patch_dirs for word in ("--patch-dir", str(place))]
    _command_line("generate", "--out", str(bundle), *further)
    python = await asyncio.to_thread(environments.engine, options.vllm, options.lmcache)
    tiny = model.make(options.out / "model", seed=options.seed)
    load = Load(
        prompts=tuple(model.prompts(PROMPTS, PROMPT_TOKENS, options.seed)),
        seconds=options.seconds,
        calm=options.calm,
        seed=options.seed,
    )
    arms: dict[str, Mapping[str, str]] = {
        "stock": {},
        "patched": {"PYTHONPATH": str(bundle), "LIVEPATCH_STATE_DIR": str(state)},
    }
    deployed = {
        name: topology.local(topology.load("lmcache"), python, tiny, injected) for name, injected in arms.items()
    }
    say(f"booting two engines side by side; logs are in {options.out}")
    async with (
        Supervisor(options.out / "stock", _progress(begun, "stock: ")) as stock_parts,
        Supervisor(options.out / "patched", _progress(begun, "patched: ")) as patched_parts,
    ):
        # Booting is importing, most of it on one core: both sides together take little longer than one.
        await together(
            stock_parts.start(deployed["stock"].parts),
            patched_parts.start(deployed["patched"].parts),
        )
        stock_course = _course(stock_parts, deployed["stock"].url, load, None, _progress(begun, "stock: "))
        stock = await patched_parts.guard(stock_course)
        await stock_parts.stop()
        patched = await _course(patched_parts, deployed["patched"].url, load, state, _progress(begun, "patched: "))
        say("shutting down")
    checks = _judge(stock, patched, load)
    shape = {key: value for key, value in asdict(load).items() if key != "prompts"}
    return {
        "vllm": options.vllm,
        "lmcache": options.lmcache,
        "cores": os.cpu_count(),
        "load": {**shape, "prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS},
        "stock": stock,
        "patched": patched,
        "checks": [{"check": check, "passed": passed} for check, passed in checks],
        "ok": all(passed for _, passed in checks),
        "seconds": round(time.monotonic() - begun, 1),
    }


async def _course(parts: Supervisor, url: str, load: Load, state: Path | None, say: Say) -> dict[str, Any]:
    """One side: warm up, storm, see what is left. The death of the engine is a result, not an error."""
    engine_log = parts.directory / "engine.log"
    tally = Tally()
    side: dict[str, Any] = {"boot_seconds": parts.up_seconds(), "survived": True, "died_after": None, "death": None}
    async with Client(url, topology.MODEL_NAME, load.request_timeout) as client:
        try:
            expected = await parts.guard(warm(client, load))
            before = await _loaded_tokens(client)
            say(f"warm: {len(expected)} prompts asked for and stored; the storm begins")
            await parts.guard(_narrated(storm(client, load, expected, tally), tally, say))
            side["kv_usage_at_end"] = await parts.guard(drained(client, load))
            side["loaded_tokens"] = await _loaded_tokens(client) - before
        except PartFailed as failed:
            if failed.part != "engine" or not tally.events:
                raise
            failures = [when for when, kind in tally.events if kind == "failed"]
            say(f"engine {failed.what}")
            side.update(survived=False, death=failed.what, log_tail=failed.tail)
            if failures and tally.hang_ups_from is not None:
                side["died_after"] = round(max(0.0, min(failures) - tally.hang_ups_from), 2)
    side.update(summary(tally))
    log = tail(engine_log, lines=sys.maxsize)
    side["assertion"] = _assertion(log)
    side["errors_logged"] = sum(1 for line in log if _ERROR.search(line))
    if state is not None:
        (parts.directory / "processes.json").write_text(json.dumps(parts.processes(), indent=1), encoding="utf-8")
        status = _command_line("status", "--json", "--state-dir", str(state))
        (parts.directory / "status.json").write_text(status, encoding="utf-8")
        side["stale_ids"] = _dropped(json.loads(status))
    return side


def _judge(stock: dict[str, Any], patched: dict[str, Any], load: Load) -> list[tuple[str, bool]]:
    """The conditions, in words, and whether they are met."""
    expected_death = not stock["survived"] and all(
        any(part in line for line in stock["assertion"]) for part in ASSERTION
    )
    return [
        ("stock: the engine core dies on the scheduler's assertion", expected_death),
        (f"patched: engine and LMCache server live through {load.seconds:.0f} s of it", patched["survived"]),
        ("patched: every request that its client waited for is answered", patched["failed"] == 0),
        ("patched: every output equals the warm run's", patched["completed"] > 0 and patched["mismatches"] == 0),
        ("patched: no error in the engine's log", patched["errors_logged"] == 0),
        ("patched: KV usage is back to 0", patched.get("kv_usage_at_end") == 0),
        ("patched: the fault was met (stale ids were dropped)", sum(patched["stale_ids"].values()) > 0),
    ]


def _assertion(log: list[str]) -> list[str]:
    """The end of the traceback that ends in a failed assertion, without the logger's prefixes; none: an empty list."""
    plain = [_SITE.sub('File "', _LOG_PREFIX.sub("", line)).rstrip() for line in log]
    ends = [number for number, line in enumerate(plain) if line.startswith("AssertionError")]
    return plain[max(0, ends[0] - 5) : ends[0] + 1] if ends else []


def _dropped(status: list[dict[str, Any]]) -> dict[str, int]:
    """The patch's counters, added up over the processes: stale ids by kind."""
    total: Counter[str] = Counter()
    for process in status:
        for patch in process["patches"]:
            if patch["name"] == PATCH:
                total.update(patch["counters"])
    return dict(total)


async def _loaded_tokens(client: Client) -> int:
    return int(await client.metric("vllm:external_prefix_cache_hits_total"))


async def _narrated(work: Coroutine[Any, Any, None], tally: Tally, say: Say) -> None:
    async def tell() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            kinds = ("completed", "disconnected", "failed")
            say(", ".join(f"{tally.count(kind)} {kind}" for kind in kinds))

    teller = asyncio.create_task(tell())
    try:
        await work
    finally:
        teller.cancel()


def _command_line(*arguments: str) -> str:
    """What the project's own command prints. It is run as a user runs it; what it remarks is shown if it fails."""
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", *arguments]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
        done.check_returncode()
    return done.stdout


def _progress(begun: float, prefix: str = "") -> Say:
    return lambda line: print(f"[{time.monotonic() - begun:4.0f} s] {prefix}{line}", file=sys.stderr, flush=True)


async def _interruptible(options: Options) -> dict[str, Any]:
    """``run``, cancelled (and so cleaned up after) by a signal, be it Ctrl-C, a closed terminal or a CI's time-out."""
    task = asyncio.ensure_future(run(options))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=5, help="How long the patched side is stormed.")] = 120,
    calm: Annotated[float, typer.Option(min=0, help="Seconds of load before clients begin to hang up.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the model, the prompts and the load.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="For logs, picture and JSON.")] = None,
    patch_dir: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Further patches for the bundle; repeatable.")
    ] = None,
) -> None:
    """A stock vLLM engine with LMCache dies when its clients hang up; the same engine with the bundle lives."""
    place = out or environments.cache_directory() / "demo" / time.strftime("%Y%m%d-%H%M%S")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place} cannot be the output directory: {error.strerror}") from error
    further = tuple(entry.resolve() for entry in patch_dir or ())
    options = Options(out=place.resolve(), seconds=seconds, calm=calm, seed=seed, patch_dirs=further)
    try:
        result = asyncio.run(_interruptible(options))
    except (PartFailed, environments.InstallationError) as error:
        print(f"demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except subprocess.CalledProcessError as error:
        if error.returncode == 2:  # bad input, and said so
            raise typer.Exit(2) from error
        print(f"demo: exit code {error.returncode} from {' '.join(error.cmd[2:])}", file=sys.stderr)
        raise typer.Exit(1) from error
    except (aiohttp.ClientError, RequestFailed) as error:
        print(f"demo: a request outside the storm failed: {error}; logs are in {place}", file=sys.stderr)
        raise typer.Exit(1) from error
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        print("demo: stopped", file=sys.stderr)
        raise typer.Exit(130) from error
    report.write(result, options.out / "result.json")
    report.picture(result, options.out / "completions.png")
    _conclude(result, options.out)
    raise typer.Exit(0 if result["ok"] else 1)


def _conclude(result: dict[str, Any], place: Path) -> None:
    console = Console()
    for side in ("stock", "patched"):
        if result[side]["death"]:
            lines = result[side]["assertion"] or result[side]["log_tail"]
            print(f"{side}: the engine {result[side]['death']}. From its log:")
            print("\n".join(f"  | {line}" for line in lines), end="\n\n")
    report.show(result, console)
    print(f"\npicture: {place / 'completions.png'}\nfigures: {place / 'result.json'}")
    print(f"logs:    {place / 'stock'}, {place / 'patched'}\ntook {result['seconds']:.0f} s")


def main() -> NoReturn:
    """Run the command; bad input is one line on stderr and exit 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except Exception as error:
        # click's errors, wherever this release of typer keeps its click.
        formatted = getattr(error, "format_message", None)
        if formatted is None and not isinstance(error, UserError):
            raise
        message = str(error) if formatted is None else formatted()
        print(f"demo: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
