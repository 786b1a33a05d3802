#!/usr/bin/env bash
# Every check of the project, on a fresh machine with Python 3.11 and nothing else: style, types, unit tests, the release
# tests against every pinned vLLM, and the engine itself. Environments and sources are kept in the user's cache.
#
#   tools/test.sh [fast] [PYTEST'S ARGUMENTS]...
#
# `fast` is style, types and the unit tests without those of tests/unit/slow.txt: before each commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/bootstrap.sh
# A container's image may set it. Each process of the tests would compile all that it imports of this checkout.
unset PYTHONDONTWRITEBYTECODE
python=$(ensure_tool_env lab,test)
# What failed is run once more, alone: a shared machine stops for seconds at times, and a real socket gives up meanwhile.
# Who needed that is named first, with why, and is to be mended; what fails twice has failed. A test that hangs is ended
# by --timeout, with the stack of each thread, in either run, and what does not end for all that by `timeout`.
step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }
# Arguments go to each step: where they choose no test of one, that is no failure.
chosen=$*
tests() {
    local status=0 failed=$log.failed-${1//\//-}
    once "$failed" "$@" || status=$?
    if [ "$status" = 1 ]; then
        printf '\n== once more: what failed of %s\n' "$1"
        status=0
        once "$failed" "$@" --last-failed --last-failed-no-failures none || status=$?
    fi
    [ "$status" = 0 ] || { [ "$status" = 5 ] && [ -n "$chosen" ]; }
}
once() { timeout --foreground -k 30 1500 "$python" -m pytest -o cache_dir="$1" -o faulthandler_timeout=400 "${@:2}"; }

if [ "${1-}" = fast ]; then
    shift
    log=$(mktemp)
    tools/types.sh "$python" >"$log" 2>&1 &
    typing=$!
    trap 'kill "$typing" 2>/dev/null || true; rm -f "$log"' EXIT
    step "style, and types in the background"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    step "the unit tests that take the least"
    mapfile -t slow < <(sed 's|^|--ignore=tests/unit/|' tests/unit/slow.txt)
    "$python" -m pytest tests/unit -n 2 --dist loadfile -q --timeout 300 "${slow[@]}" "$@"
    step "types"
    wait "$typing" || { cat "$log"; exit 1; }
    cat "$log"
    step "done"
    exit
fi

step "in the background: the engine's environment and the pinned sources"
log=$(mktemp)
"$python" -m vllm_livepatch.tools.lab.prepare >"$log" 2>&1 &
preparing=$!
fleets= upgrading= serving=
tools/types.sh "$python" >"$log.types" 2>&1 &
typing=$!
# Who drives Ray and Slurm is waited for: it ends what it started.
trap 'kill "$preparing" $typing $upgrading $serving 2>/dev/null || true; [ -z "$fleets" ] || wait "$fleets" || true; rm -rf "$log" "$log".*' EXIT

step "style, and types in the background"
"$python" -m ruff check .
"$python" -m ruff format --check .

step "unit tests"
tests tests/unit -n 3 -q --timeout 300 "$@"

step "types"
wait "$typing" || { cat "$log.types"; exit 1; }
typing=
cat "$log.types"

step "the engine's environment and the pinned sources"
wait "$preparing" || { cat "$log"; exit 1; }
tail -n 3 "$log"

# Most of it is waiting: for a cluster, for three engines that start, for a job that ends.
step "in the background: engines on Ray and under Slurm"
tests tests/fleets -q --durations 6 --timeout 900 "$@" >"$log.fleets" 2>&1 &
fleets=$!

# It has imported torch and the like, once for all steps that drive releases (tests/releases/interpreter.py).
mkdir "$log.warm"
"$python" tests/releases/interpreter.py "$log.warm/socket" >"$log.warm/log" 2>&1 &
serving=$!
until [ -S "$log.warm/socket" ]; do kill -0 "$serving" || { cat "$log.warm/log"; exit 1; }; sleep 0.1; done
warm=$log.warm/socket

step "release tests"
LIVEPATCH_TEST_WARM=$warm tests tests/releases -n 4 -q --timeout 600 "$@"

# Together, the long ones first, so that no core waits for another at the end of each.
step "loads without a fault, stock and patched side by side; the real schedulers in worlds drawn from a seed"
LIVEPATCH_TEST_WARM=$warm tests tests/scale tests/simulation -n 2 --dist worksteal -q --timeout 600 "$@"

kill "$serving" || true
serving=

step "engines on Ray and under Slurm"
wait "$fleets" || { cat "$log.fleets"; exit 1; }
fleets=
cat "$log.fleets"

step "in the background: 1,000 starts of Python during 100 upgrades of their bundle"
nice -n 10 "$python" -m tests.unit.upgrades >"$log.upgrades" 2>&1 &
upgrading=$!

step "the engine, alone and in pairs"
tests tests/e2e -n 2 --dist loadfile -q --durations 6 --timeout 900 "$@"

step "1,000 starts of Python during 100 upgrades of their bundle"
wait "$upgrading" || { cat "$log.upgrades"; exit 1; }
upgrading=
cat "$log.upgrades"
step "done"
