"""The demo: a stock engine dies of clients that hang up; the same engine with the bundle on PYTHONPATH lives.

One run of the lab, and a judgement of its result: `lab lmcache --fault disconnects --compare`. Exit code 0 only if the
stock engine died as expected and the patched one met every condition; 1 otherwise; 2 for bad input.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_livepatch.tools.commands import ending
from vllm_livepatch.tools.lab import command, lab, loads, topology

PATCH = "stale-finished-recving"
ASSERTION = ("_update_from_kv_xfer_finished", "assert req_id in self.requests", "AssertionError")
CLIENTS, PROMPTS = 24, 24

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=5, help="How long the patched side is stormed.")] = 120,
    calm: Annotated[float, typer.Option(min=0, help="Seconds of load before clients begin to hang up.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the model, the prompts and the load.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="For logs, pictures and JSON.")] = None,
    patch_dir: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Further patches for the bundle; repeatable.")
    ] = None,
) -> None:
    """A stock vLLM engine with LMCache dies when its clients hang up; the same engine with the bundle lives."""
    options = lab.Options(
        topology=topology.load("lmcache"),
        out=command.directory(out, "demo"),
        load=loads.Storm(prompts=PROMPTS, calm=calm, stream="half", api="half"),
        disconnects=True,
        setups=("stock", "patched"),
        seconds=seconds,
        clients=CLIENTS,
        patch_dirs=tuple(entry.resolve() for entry in patch_dir or ()),
        seed=seed,
    )
    result = command.conduct("demo", options)
    checks = judge(**result["setups"], seconds=seconds)
    result["checks"] = [{"check": check, "passed": passed} for check, passed in checks]
    result["ok"] = all(passed for _, passed in checks)
    command.conclude(result, options.out)
    raise typer.Exit(0 if result["ok"] else 1)


def judge(stock: dict[str, Any], patched: dict[str, Any], seconds: float) -> list[tuple[str, bool]]:
    """The conditions, in words, and whether they are met."""
    expected_death = not stock["survived"] and all(
        any(part in line for line in stock["assertion"]) for part in ASSERTION
    )
    back = patched.get("kv_usage_at_end")
    return [
        ("stock: the engine core dies on the scheduler's assertion", expected_death),
        (f"patched: engine and LMCache server live through {seconds:.0f} s of it", patched["survived"]),
        ("patched: every request that its client waited for is answered", patched["failed"] == 0),
        ("patched: every output equals the undisturbed run's", patched["completed"] > 0 == patched["mismatches"]),
        ("patched: no error in the engine's log", patched["errors_logged"]["engine"] == 0),
        ("patched: KV usage is back to 0", back is not None and set(back.values()) == {0}),
        ("patched: the fault was met (stale ids were dropped)", sum(stale_ids(patched["status"]).values()) > 0),
    ]


def stale_ids(status: list[dict[str, Any]]) -> dict[str, int]:
    """The patch's counters, added up over the processes: stale ids by kind."""
    total: Counter[str] = Counter()
    for process in status:
        for patch in process["patches"]:
            if patch["name"] == PATCH:
                total.update(patch["counters"])
    return dict(total)


if __name__ == "__main__":
    ending.end_with(app, name="demo", bare=())
