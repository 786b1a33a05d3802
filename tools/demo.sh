#!/usr/bin/env bash
# A stock vLLM engine with LMCache dies when its clients hang up; the same engine with the bundle lives. On a fresh
# machine with Python 3.11 and nothing else: environments are built in the user's cache directory, once.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
python=$(ensure_tool_env lab)
exec "$python" -m vllm_livepatch.tools.lab.demo "$@"
