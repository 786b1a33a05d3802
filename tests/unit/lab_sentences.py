"""The sentences and hand-made tables about the lab's runs that have figures, as in sentences.py."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_livepatch.tools.lab import model, topology

from .kept_results import Kept, again, counted, kept, right, setups


def lmcache_lost() -> Iterator[str]:
    runs = [
        kept(f"lab-lmcache-lost/{name}")
        for name in (
            "kill-0.29.0",
            "kill-0.32.0",
            "stop-0.32.0",
            "again-stop-0.29.0",
            "again-stop-0.32.0",
            "again-kill-0.29.0",
            "again-kill-0.32.0",
        )
    ]

    def cell(setup: Kept | None, timeout: float) -> str:
        if setup is None:
            return "-"
        asked = setup["completed"] + setup["failed"]
        if setup["failed"]:
            assert setup["errors"] == {f"no answer within {timeout:.0f} s": setup["failed"]}
            return f"{setup['failed']} of {asked} got no answer within {timeout:.0f} s"
        return f"{asked} of {asked} answered, the longest took {setup['longest_wait']:.1f} s"

    for run in runs:
        (fault,) = run["faults"]
        what = f"{'killed' if fault['kind'] == 'kill' else 'stopped'} at {fault['at']:.0f} s"
        call = run["injected"]["slow-lmcache"].get("LIVEPATCH_SLOW_LMCACHE_SECONDS", "0.3")
        cells = [cell(run["setups"].get(setup), run["load"]["timeout"]) for setup in ("stock", "patched")]
        yield f"| {what}, back {fault['lasts']:.0f} s later | {run['vllm']} | {call} s | {' | '.join(cells)} |"
        right(run["setups"]["patched"])
        assert not any(setup["mismatches"] for setup in run["setups"].values())
    gave_up = sorted(
        run["load"]["timeout"] for run in runs if "stock" in run["setups"] and run["setups"]["stock"]["failed"]
    )
    yield f"The clients gave up after {gave_up[0]:.0f} or {gave_up[-1]:.0f} s"
    returns = [again(run["setups"]["patched"]) for run in runs]
    yield f"that are loaded (patched, {min(returns):.1f} to {max(returns):.1f} s in these runs)"
    slow = kept("lab-lmcache-lost/kill-0.32.0")
    call, prompts = int(slow["injected"]["slow-lmcache"]["LIVEPATCH_SLOW_LMCACHE_SECONDS"]), slow["load"]["prompts"]
    yield f"two calls of {call} s, one after the other, of all requests of a step: {prompts} of them"
    yield f"are {2 * call * prompts} of the {again(slow['setups']['patched']):.1f} s after the kill on {slow['vllm']}."
    forgotten = kept("lab-lmcache-lost/forgotten-0.29.0")
    stock, patched = forgotten["setups"].values()
    yield f"the engine is stopped for {forgotten['faults'][0]['lasts']:.0f} s, {forgotten['vllm']})"
    assert stock["loaded_again"] == [["engine", None]]
    yield (
        f"{stock['failed']} of {stock['completed'] + stock['failed']} requests got no answer within "
        f"{forgotten['load']['timeout']:.0f} s"
    )
    right(patched)
    yield f"Patched, {patched['completed']} of {patched['completed']} answered, none differs, and KV is loaded again"
    yield f"{again(patched):.1f} s after the engine goes on."


def lab_lease() -> Iterator[str]:
    late, stopped = kept("lab-lease/late-0.29.0"), kept("lab-lease/stopped-0.29.0")
    seconds = late["injected"]["late-requests"]["LIVEPATCH_LATE_REQUESTS_SECONDS"]
    yield f"the decode engines hear of half of their requests {seconds} s late"
    yield f"a decode engine is stopped (SIGSTOP) for {stopped['faults'][0]['lasts']:.0f} s."


def prefill_decode() -> Iterator[str]:
    place = "lab-prefill-decode"
    run, earlier = kept(f"{place}/kill-decode-0.29.0"), kept(f"{place}/kill-decode-again-0.29.0")
    stock, patched = run["setups"].values()
    held, kinder = stock["held"]["prefill"], patched["held"]["prefill"]
    yield f"pile up to {100 * held['share']:.1f} % until `other` has read what waits for it."
    yield f"come back when their lease of {run['settings']['lease']:.0f} s is over"
    yield f"the counter `stranded` says {counted(patched, 'kv-block-reaper', 'stranded')}"
    yield f"no more than {100 * kinder['share']:.1f} % are in use"
    yield (
        f"On stock the prefill engine held blocks for {held['seconds']:.0f} s with no request left, "
        f"patched for {kinder['seconds']:.0f} s."
    )

    def token(result: Kept) -> str:
        medians = sorted(1000 * setup["between_tokens"]["0.5"] for setup in result["setups"].values())
        return f"{medians[0]:.0f} to {medians[-1]:.0f}"

    yield f"On {earlier['date']}, a machine on which a token takes {token(earlier)} ms (here {token(run)})"
    before, after = (setup["held"]["prefill"] for setup in earlier["setups"].values())
    shares = f"{100 * before['share']:.1f} and {100 * after['share']:.1f} %"
    (back,) = {f"{setup['back_after']:.0f}" for setup in earlier["setups"].values()}
    yield f"{before['seconds']:.0f} s on stock and {after['seconds']:.0f} s patched ({shares}), back {back} s after the load"
    yield f"{held['cores_then']:.2f} cores while it serves nobody, {held['cores_else']:.2f} when nothing is held."
    yield f"Patched (`idle-stepping`) it takes {kinder['cores_then']:.2f}, and {kinder['cores_else']:.2f}."

    (long_died, usual), (died, short) = (
        setups(f"{place}/kill-lmcache-300-0.29.0"),
        setups(f"{place}/kill-lmcache-0.29.0"),
    )
    yield f"{long_died['died_after']:.1f} s and {died['died_after']:.1f} s after the load began (two runs)"
    right(usual, short)
    yield f"with 300 s, {usual['completed']} requests are answered, none fails, none differs, and the longest answer took"
    yield f"the longest answer took {usual['longest_wait']:.1f} s."
    yield f"the longest took {short['longest_wait']:.1f} s ({short['completed']} answered, none failed, none differs)."
    backs = sorted(setup["back_after"] for setup in (usual, short))
    yield f"Blocks held after the load, for {backs[0]:.0f} to {backs[1]:.0f} s"

    slow = kept(f"{place}/slow-transfer-stop-decode-0.29.0")
    (setup,) = slow["setups"].values()
    right(setup)
    yield f"reported {slow['injected']['slow-transfer']['LIVEPATCH_SLOW_TRANSFER_SECONDS']} s later"
    yield f"stopped for {slow['faults'][0]['lasts']:.0f} s: all {setup['completed']} requests are answered and right"
    first = setup["first_token"]
    yield f"the first token takes {first['0.5']:.1f} s in the median (99 %: {first['0.99']:.1f} s)"

    run = kept(f"{place}/lost-completions-0.29.0")
    (reaped,), (off,) = run["setups"].values(), setups(f"{place}/lost-completions-off-0.29.0")
    right(reaped, off)
    yield f"With one of {run['toggles']['LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS']} s: "
    yield (
        f"{counted(reaped, 'lost-completions', 'lost')} sends lost, {counted(reaped, 'kv-block-reaper', 'reaped')} "
        f"reaped, nothing held {reaped['back_after']:.0f} s after the load, all {reaped['completed']} requests right."
    )
    share = 100 * off["kv_usage_at_end"]["prefill"]
    yield (
        f"{counted(off, 'lost-completions', 'lost')} were lost and their blocks ({share:.1f} %) are still held "
        f"{off['back_after']:.0f} s after the load"
    )


def lab() -> Iterator[str]:
    for version in ("0.29.0", "0.32.0"):
        stock, patched = setups(f"lab/lmcache-disconnects-{version}")
        assert stock["died_after"] < 10
        assert patched["kv_usage_at_end"] == {"engine": 0.0}
        right(patched)
    yield "dies on the scheduler's assertion within seconds. With the bundle nothing fails in ten minutes, no output differs"
    (reaped,) = setups("lab-prefill-decode/lost-completions-0.29.0")
    assert counted(reaped, "lost-completions", "lost") == counted(reaped, "kv-block-reaper", "reaped")
    yield f"as many sends reaped as lost, no block held {reaped['back_after']:.0f} s after the load"


def mooncake_lab() -> Iterator[str]:
    place = "lab-mooncake"
    hang_ups = kept(f"{place}/hang-ups-0.32.0")
    stock, patched = hang_ups["setups"].values()
    stands_still = max(second for second, count in enumerate(stock["per_second"]["completed"], 1) if count)
    share = f"{100 * hang_ups['load']['share']:.0f} %"
    yield f"| {share} of clients hang up, 0.32.0, answers not streamed | **total stall** after {stands_still} s: "
    assert not any(stock["errors_logged"].values())
    yield f"s: {stock['completed']} answers, then none; no line of an error in any log |"
    right(patched)
    assert patched["kv_usage_at_end"]["decode"] == 0
    yield f"| {patched['completed']} answers, nothing fails, none differs, all of decode's blocks are free at the end |"
    stock, patched = setups(f"{place}/hang-ups-0.29.0")
    right(patched)
    yield (
        f"| {share} of clients hang up, 0.29.0 | the decode engine is dead after {stock['died_after']:.1f} s, on the "
        f"scheduler's assertion | {patched['completed']} answers, nothing fails, none differs |"
    )
    stops = kept(f"{place}/stops-both-0.29.0")
    stock, patched = stops["setups"].values()
    right(patched)
    yield f"while both legs were sent, 0.29.0, {stops['settings']['abort_timeout']:.0f} s for each wait"
    yield f"**stands still**: {stock['completed']} answers in {stops['load']['seconds']:.0f} s; each client waits"
    yield f"| {patched['completed']} answers, nothing fails, none differs; those prompts are computed by decode |"
    stopped = kept(f"{place}/stop-prefill-0.32.0")
    stock, patched = stopped["setups"].values()
    right(patched)
    yield f"| prefill is stopped (SIGSTOP) for {stopped['faults'][0]['lasts']:.0f} s amid its transfers, 0.32.0, "
    yield f"{stopped['settings']['abort_timeout']:.0f} s for each wait, both legs sent"
    assert stock["failed"] == counted(patched, "failed-loads", "recomputed") == 8
    yield f"the eight requests whose loads were under way fail after {stock['longest_wait']:.1f} s |"
    yield f"the eight are computed by decode after {patched['longest_wait']:.1f} s at most"
    held, back = (counted(patched, "mooncake-failed-loads", counter) for counter in ("held", "given_back"))
    yield f"{held} `held`, {back} `given_back`, none differs"
    stock, patched = setups(f"{place}/lmcache-hang-ups-0.32.0")
    right(patched)
    assert patched["kv_usage_at_end"]["decode"] == 0
    yield f"| {share} of clients hang up, an LMCache server behind prefill, 0.32.0 | the prefill engine's core is dead"
    yield f"core is dead after {stock['died_after']:.1f} s"
    yield f"| {patched['completed']} answers, nothing fails, none differs, all of decode's blocks are free at the end |"
    lost = kept(f"{place}/lost-prefills-0.29.0")
    stock, patched = lost["setups"].values()
    right(patched)
    wait = f"{lost['settings']['abort_timeout']:.0f} s"
    assert counted(patched, "failed-loads", "recomputed") == 8
    yield f"never hears of it, 0.29.0, {wait} for each wait"
    yield f"**stands still**: {stock['completed']} answers in {lost['load']['seconds']:.0f} s; each such client waits"
    yield (
        f"| {patched['completed']} answers, nothing fails, none differs; those eight prompts are computed by decode "
        f"when the {wait} are over"
    )

    (stock, patched), (stock_later, later) = (
        setups(f"{place}/kill-prefill-{version}") for version in ("0.29.0", "0.32.0")
    )
    assert not any(setup["mismatches"] for setup in (stock, patched, stock_later, later))
    yield (
        f"decode loads from prefill again {again(patched):.1f} s (0.29.0) and {again(later):.1f} s (0.32.0) after its "
        f"return, and computes {counted(patched, 'failed-loads', 'recomputed')} and "
        f"{counted(later, 'failed-loads', 'recomputed')} requests itself."
    )
    yield (
        f"They have {patched['completed']} answers where stock has {stock['completed']}, and {later['completed']} where "
        f"stock has {stock_later['completed']}."
    )

    link = kept(f"{place}/link-2-0.32.0")
    (setup,) = link["setups"].values()
    blocks = -(-link["load"]["tokens"] // topology.BLOCK_SIZE)
    size = blocks * topology.BLOCK_SIZE * model.LAYERS * 2 * model.HIDDEN * 4  # K and V, float32
    rate = int(link["injected"]["link"]["LIVEPATCH_LINK_MB"])
    yield f"has {blocks} blocks, {size:,} bytes: at {rate} MB/s they take {size / rate / 1e6:.2f} s, and one client's"
    yield f"one client's first token came after {setup['first_token']['0.5']:.2f} s, in the median"
    layer = kept(f"{place}/layer-hang-ups-0.32.0")
    (setup,) = layer["setups"].values()
    right(setup)
    assert setup["kv_usage_at_end"]["decode"] == 0
    yield f"a link of {layer['injected']['link']['LIVEPATCH_LINK_MB']} MB/s: {setup['completed']} answers, "
    yield f"{setup['disconnected']} hang-ups, nothing fails, none differs"
    yield f"{counted(setup, 'mooncake-layerwise', 'early')} blocks left early"


def lab_gpu() -> Iterator[str]:
    def differ(setup: Kept) -> str:
        return f"{setup['mismatches']} of {setup['completed']:,}"

    died, lived = setups("lab-gpu/hang-ups-0.26.0")
    assert not died["survived"]
    assert lived["survived"]
    assert "assert req_id in self.requests" in "\n".join(died["assertion"])
    assert lived["kv_usage_at_end"] == {"engine": 0.0}
    yield f"Stock dies of the same assertion as on CPU, {died['died_after']:.2f} s after the first clients hang up"
    (invariant,) = setups("lab-gpu/hang-ups-invariant-0.26.0")
    right(invariant)
    yield f"{differ(invariant)} differ. Without it"
    (once_more,) = setups("lab-gpu/hang-ups-again-0.26.0")
    yield f"{differ(lived)} and {differ(once_more)}."
    stock, patched = setups("lab-gpu/no-connector-0.26.0")
    assert kept("lab-gpu/no-connector-0.26.0")["topology"] == "engine"
    yield f"stock {differ(stock)}, patched {differ(patched)}, since"
    calm = setups("lab-gpu/calm-0.26.0")
    assert differ(calm[0]) == differ(calm[1])
    yield f"{differ(calm[0])} differ, stock and patched"

    checks = kept("gpu")["checks"]
    assert not any(check["wrong"] for check in checks.values())
    moved = checks["mp-block-transfer"]["found"]
    times = moved["microseconds"].values()
    ours = [time["ours"] for time in times]
    of_copy = [time["ours"] / time["memcpy"] for time in times]
    of_loop = [time["ours"] / time["loop"] for time in times]
    assert moved["wrong"] == []
    yield f"{moved['cases']} random layouts"
    yield (
        f"{min(ours):.0f} to {max(ours):.0f} us a transfer: {min(of_copy):.2f} to {max(of_copy):.2f} times one copy of as "
        f"many bytes, {min(of_loop):.2f} to {max(of_loop):.2f} of a loop's time"
    )
    pinned = checks["rocm-pinned-allocator"]["found"]
    grown = sorted({state["pinned"] for state in pinned["patched"]["grows"]["states"]})
    assert {state["pinned"] for state in pinned["stock"]["grows"]["states"]} == {grown[-1]}
    yield f"stock: all {grown[-1]} MiB at once, with nothing stored. Patched: {', '.join(map(str, grown))} MiB"
    sent = checks["mooncake-layerwise"]["found"]
    for by in ("chunk", "layer"):
        assert sent[by]["cpu"]["found"] == sent[by]["cuda"]["found"]
        assert len(sent[by]["cpu"]["found"]) > 20
        assert all("wrong: " in str(came) for came in sent[by]["unawaited"]["found"].values())
    yield f"{sent['chunk']['cuda']['early']} steps, and {sent['layer']['cuda']['early']} layers, were still queued"
