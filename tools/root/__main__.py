"""`python -m vllm_livepatch`, and what the command `vllm-livepatch` starts. Ctrl-C ends it quietly at any time."""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    try:
        from vllm_livepatch.tools import cli  # half a second, in which somebody may press Ctrl-C

        cli.main()
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # what else is under way waits for nobody


if __name__ == "__main__":
    main()
