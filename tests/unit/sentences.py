"""The sentences and hand-made tables of the pages that have figures, made anew from the results that are kept.

Each function gives what its page must say, and asserts what else the sentences claim. test_prose_figures.py looks for
them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator

from packaging.version import Version
from vllm_livepatch.tools.bench import figures

from .kept_results import ROOT, kept, setups
from .lab_sentences import lab, lab_gpu, lab_lease, lmcache_lost, mooncake_lab, prefill_decode


def readme() -> Iterator[str]:
    lives = kept("lab/lmcache-disconnects-0.32.0")
    stock, patched = lives["setups"].values()
    load = lives["load"]
    yield f"| {load['clients']} clients, {load['share']:.0%} hang up, {load['seconds']:.0f} s (".replace("%", " %")
    assert patched["survived"]
    yield f"| survived | dead after {stock['died_after']:.1f} s: `assert req_id in self.requests` | yes |"
    yield f"| completed | {stock['completed']} | {patched['completed']} |"
    yield f"| failed | {stock['failed']} | {patched['failed']} |"
    differ = f"{stock['mismatches']} | {patched['mismatches']}"
    yield f"| outputs that differ from an undisturbed run's | {differ} |"
    late, stopped = kept("lab-lease/late-0.29.0"), kept("lab-lease/stopped-0.29.0")
    yield f"With the lease cut from 30 s to {late['settings']['lease']:.0f} s and few blocks"
    seconds = late["injected"]["late-requests"]["LIVEPATCH_LATE_REQUESTS_SECONDS"]
    (lasts,) = {fault["lasts"] for fault in stopped["faults"]}
    assert len(stopped["faults"]) == 3
    for written, name in (
        (f"half of the requests reach the decode engine {seconds} s late", "late-0.29.0"),
        ("the same", "late-0.32.0"),
        (f"a decode engine is stopped for {lasts:.0f} s, three times", "stopped-0.29.0"),
        ("the same", "stopped-0.32.0"),
    ):
        cells = [f"{setup['mismatches']} of {setup['completed']}" for setup in setups(f"lab-lease/{name}")]
        yield f"| {written}, vLLM {kept(f'lab-lease/{name}')['vllm']} | {' | '.join(cells)} |"


def chunked_load() -> Iterator[str]:
    details = kept("figures/chunked_load")["details"]
    rounds = {setup: values["rounds"] for setup, values in details["setups"].items()}

    def of(setup: str, key: str) -> list[float]:
        return [one[key] for one in rounds[setup]]

    def over(setup: str, other: str, key: str) -> float:
        return float(figures.ratio(of(setup, key), of(other, key)))

    prefill, load = details["costs"]["prefill"], details["costs"]["load"]
    times = f"{prefill / load:.0f} times as long"
    yield f"prefill takes {1000 * prefill:.0f} ms and the load {1000 * load:.0f} ms: {times}"
    spread = {
        setup: 100 * (max(found) / min(found) - 1) for setup in rounds for found in [of(setup, "prompts_a_second")]
    }
    each = f"`off` {spread['off']:.0f} %, `on` {spread['on']:.0f} %, no offload {spread['none']:.0f} %"
    yield f"the prompts a second of a setup's rounds differ by up to {max(spread.values()):.0f} % ({each})."
    apart = 100 * abs(over("on", "off", "prompts_a_second") - 1)
    where = "within" if apart <= max(spread["on"], spread["off"]) else "beyond"
    yield f"What `on` differs from `off` ({apart:.0f} %) is {where} that."
    mine, others = ([whole for whole, _ in details["setups"][setup]["alone"]] for setup in ("on", "off"))
    low, high = figures.interval([one - other for one, other in zip(mine, others, strict=True)])
    assert low < 0 < high, "then say which is later"
    yield (
        f"A prompt alone takes {figures.difference(mine, others)} longer with `on`, of {len(mine)} pairs: "
        "no difference that they show."
    )
    yield f"here, {1 / over('none', 'off', 'prompts_a_second'):.1f} times the prompts a second."
    mean, p99 = over("none", "off", "between_mean"), over("none", "off", "between_p99")
    yield f"Without it the mean time between tokens is {mean:.1f} times as long, and its p99 {p99:.1f} times"
    everything = [one for found in rounds.values() for one in found]
    assert not any(one["failures"] for one in everything)
    others = sum(one["other_outputs"] for one in everything)
    yield (
        f"{others} answers were others than those of a prompt alone."
        if others
        else "All answers were the same in all setups."
    )
    steps = {setup: statistics.median(of(setup, "steps")) for setup in rounds}
    yield f"Above, {steps['parts']:.0f} steps where `off` takes {steps['off']:.0f}."
    median = "rises" if over("parts", "off", "between_median") > 1 else "falls"
    shorter = "falls" if over("parts", "off", "between_p99") < 1 else "rises"
    yield f"so the median between tokens {median}, and each is shorter, so the p99 {shorter}."


def chunked_load_patch() -> Iterator[str]:
    """Of patches/chunked_lmcache_load/patch.toml."""
    details = kept("figures/chunked_load")["details"]
    rates = {
        setup: [one["prompts_a_second"] for one in details["setups"][setup]["rounds"]] for setup in ("none", "off")
    }
    more = 1 / float(figures.ratio(rates["none"], rates["off"]))
    longer = details["costs"]["prefill"] / details["costs"]["load"]
    yield f"with {longer:.0f} times as long, {more:.1f} times the prompts a second were seen"


def holds_seen_later() -> None:
    """The times that the patch's constants allow, which the measured ones keep."""
    later: dict[str, list[float]] = {}
    for name, *cells in kept("figures/idle_steps")["rows"]:
        found = re.search(r"a hold of ([\d.]+) s, seen later by", name)
        if found:
            stock, patched = (float(cell.removesuffix(" ms")) for cell in cells)
            later.setdefault(found[1], []).append(patched - stock)
    assert later.keys() == {"0.1", "2"}
    assert max(later["0.1"]) <= 100 / 8
    assert max(later["2"]) <= 50


def idle_stepping() -> Iterator[str]:
    holds_seen_later()
    yield "a hold that ends after 100 ms is seen 12 ms later at most, one that lasts longer 50 ms."
    if not (ROOT / "tests/results/figures/idle_stepping.json").is_file():
        yield "No table of it is kept yet."


def idle_stepping_patch() -> Iterator[str]:
    holds_seen_later()
    yield "of one of a tenth of a second 12 ms, of a longer one 50 ms at most."


def steps() -> Iterator[str]:
    for version in ("0.29.0", "0.32.0"):
        _, patched = setups(f"lab/lmcache-disconnects-{version}")
        assert 0.001 < patched["between_tokens"]["0.5"] < 0.1
    yield "A step of a real engine takes milliseconds."


def layerwise() -> Iterator[str]:
    """Ratios of medians are held by test_lab_figures.py."""
    rows = {(row["link"], row["tokens"], row["at_once"]): row for row in kept("layerwise")["rows"]}
    long = rows[400, 8192, 1]
    prefill, layer = long["median"]["prefill"], long["median"]["layer"]
    yield f"takes {prefill / long['transfer']:.1f} times its transfer. The first token comes {layer - prefill:.1f} s after"
    yield f"a prefill engine by itself has finished ({layer:.1f} and {prefill:.1f} s)."
    short = {
        setup: (round(1000 * min(seconds)), round(1000 * max(seconds)))
        for setup, seconds in rows[0, 256, 1]["seconds"].items()
    }
    (least, most), (low, high) = short["chunk"], short["stock"]
    yield f"its rounds, {least} to {most} ms, lie among stock's, {low} to {high} ms."
    even = rows[100, 256, 16]["seconds"]
    yield f"all come by {max(even['chunk']):.1f} s instead of {max(even['stock']):.1f} s."
    differ = {tokens: row["differ"] for (_, tokens, _), row in rows.items()}
    assert [tokens for tokens, setup in differ.items() if len(set(setup.values())) > 1] == [3072]
    assert differ[3072] == {"stock": 0, "again": 0, "layer": 0, "chunk": 2}
    slower = [
        row["median"]["prefill"] / rows[row["link"], row["tokens"], row["at_once"]]["median"]["prefill"]
        for row in kept("layerwise-before")["rows"]
    ]
    yield f"Prefill takes {min(slower):.1f} to {max(slower):.1f} times as long here as above"
    yield f"with much KV a token ({kept('layerwise')['token_bytes'] // 1024} KiB)"


def layerwise_patch() -> Iterator[str]:
    """Of one prompt at a time, of some thousand tokens at most: a longer one's prefill takes longer than its transfer."""
    alone = [
        row["transfer"] / row["median"]["prefill"]
        for row in kept("layerwise")["rows"]
        if (row["link"], row["at_once"]) == (400, 1) and row["tokens"] <= 3072
    ]
    assert len(alone) == 3
    assert 2 / 3 < min(alone) <= max(alone) < 3 / 2
    yield "on a link of 400 MB/s about as long again as the prefill itself."


def simulation() -> Iterator[str]:
    stock, patched = kept("simulation")
    worlds = {row["worlds"] for run in (stock, patched) for row in run["releases"].values()}
    (seeds,) = {run["seeds"][1] - run["seeds"][0] for run in (stock, patched)}
    assert worlds == {2 * seeds}
    (made,) = {(run["date"], run["revision"]) for run in (stock, patched)}
    yield f"are of {2 * seeds:,} worlds a release and setup ({seeds:,} seeds with both schedulers), {made[0]}, at `{made[1]}`."
    old = {release: row for release, row in patched["releases"].items() if Version(release) <= Version("0.21.0")}
    assert {kind for row in old.values() for kind in row["broken"]} == {"computed past its end", "never ends"}
    named = ("728", "1118", "2499")
    more = max(row["failed"] for row in old.values()) - len(named)
    yield f"- {', '.join(named[:-1])}, {named[-1]} and {more} more at most, 0.14.1 to 0.21.0"
    rest = {release: row for release, row in patched["releases"].items() if release not in old and row["failed"]}
    assert {tuple(row["first"].items()) for row in rest.values()} == {
        (("freed while being loaded", "--seed 2404 --mode AsyncScheduler"),)
    }
    assert {row["failed"] for row in rest.values()} == {1}
    yield f"- 2404, {' and '.join(rest)}: "


HELD: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": readme,
    "docs/benchmarks.md": steps,
    "docs/chunked-load.md": chunked_load,
    "docs/patches/chunked-lmcache-load.md": chunked_load_patch,
    "docs/patches/idle-stepping.md": idle_stepping_patch,
    "docs/patches/mooncake-layerwise.md": layerwise_patch,
    "docs/idle-stepping.md": idle_stepping,
    "docs/lab.md": lab,
    "docs/lab-gpu.md": lab_gpu,
    "docs/lab-lease.md": lab_lease,
    "docs/lab-lmcache-lost.md": lmcache_lost,
    "docs/lab-mooncake.md": mooncake_lab,
    "docs/lab-prefill-decode.md": prefill_decode,
    "docs/layerwise.md": layerwise,
    "docs/operate.md": steps,
    "docs/simulation.md": simulation,
}
