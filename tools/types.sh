#!/usr/bin/env bash
# mypy over the rooms and the tests: it does not know the folder mapping of pyproject.toml, so it is shown a tree of links.
# The tree stays where it is, since mypy keeps what it found of a file by the file's path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tree=$PWD/.mypy_cache/tree
mkdir -p "$tree/vllm_livepatch"
for room in patches sitecustomize tools; do ln -sfn "$PWD/$room" "$tree/vllm_livepatch/$room"; done
MYPYPATH=$tree "$1" -m mypy --config-file pyproject.toml --cache-dir .mypy_cache/rooms --namespace-packages -p vllm_livepatch
# The release tests' drivers, and what stands in for hardware, run in another environment, beside vLLM.
MYPYPATH=$tree "$1" -m mypy --config-file pyproject.toml --cache-dir .mypy_cache/tests --explicit-package-bases \
    --disable-error-code import-not-found --exclude 'tests/(releases/driver|fleets/standins)/' tests
