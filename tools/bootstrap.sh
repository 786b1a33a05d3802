# To be sourced. The tool's own environment, built on a machine with Python and nothing else.
#
#   python=$(ensure_tool_env lab,test)
#
# prints the interpreter of an environment, under the user's cache directory, with this checkout installed (editable)
# and the named extras of pyproject.toml. What was built before is used again until pyproject.toml changes.
# Progress goes to stderr. Without a usable Python: one line, and the exit code 2. TOOLS_PYTHON names the one to be used.

_checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

_usable_python() {
    local name
    for name in ${TOOLS_PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null
        then
            command -v "$name"
            return
        fi
    done
    echo "vllm-livepatch: needs Python 3.10 to 3.13 with venv (3.11 is the one it is tried with), and finds none" >&2
    return 2
}

_place_of() { # PYTHON EXTRAS: another interpreter has an environment of its own, and rebuilds none that is in use
    "$1" - "$_checkout" "$2" <<'PYTHON'
import hashlib, os, sys
cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
name = "tools-" + hashlib.sha256("\n".join([sys.executable, *sys.argv[1:]]).encode()).hexdigest()[:12]
print(os.path.join(cache, "vllm-livepatch", "environments", name))
PYTHON
}

_quietly() { # TITLE COMMAND...: its output is shown only if it fails
    local title=$1 output
    shift
    if ! output=$("$@" 2>&1); then
        echo "vllm-livepatch: $title failed:" >&2
        grep -v "^WARNING: Location '" <<<"$output" | tail -n 20 >&2
        return 1
    fi
}

ensure_tool_env() ( # a subshell: the lock goes with it
    set -euo pipefail
    extras=$1
    base=$(_usable_python)
    recipe=$("$base" - "$_checkout" "$extras" <<'PYTHON'
import hashlib, pathlib, sys
checkout, extras = sys.argv[1:]
text = "\n".join([sys.version, sys.executable, checkout, extras, pathlib.Path(checkout, "pyproject.toml").read_text("utf-8")])
print(hashlib.sha256(text.encode()).hexdigest())
PYTHON
    )
    place=$(_place_of "$base" "$extras")
    mkdir -p "$(dirname "$place")"
    exec 9>"$place.lock"
    # The lock belongs to the open file, so it is held until this shell ends, however it ends.
    "$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    if [[ $(cat "$place/complete" 2>/dev/null) != "$recipe" || ! -x $place/bin/python ]]; then
        echo "tool environment ($extras): building under the user's cache directory; once, under a minute" >&2
        local began=$SECONDS  # a shell's SECONDS may be older than this call
        rm -rf "$place"
        _quietly "making a virtual environment" "$base" -m venv "$place"
        # uv is many times faster; where it cannot reach what pip is set up to reach, pip does it.
        _quietly "installing uv" "$place/bin/python" -m pip --disable-pip-version-check --no-input install -q uv
        "$place/bin/python" -m uv pip install -q --compile-bytecode --python "$place/bin/python" -e "$_checkout[$extras]" >/dev/null 2>&1 ||
            _quietly "installing the checkout" "$place/bin/python" -m pip --disable-pip-version-check --no-input \
                install -q -e "$_checkout[$extras]"
        echo "$recipe" >"$place/complete"
        echo "tool environment ($extras): ready after $((SECONDS - began)) s" >&2
    fi
    echo "$place/bin/python"
)
