# `generate` writes this as the bundle's `__main__.py`: `python BUNDLE doctor|status|verify|check`.
#
# It parses on Python 2.7, so that an interpreter that the bundle does not serve is told so.
import os
import sys

SERVED = (3, 10), (3, 14)  # as in sitecustomize/entry.py

if not SERVED[0] <= sys.version_info[:2] <= SERVED[1]:
    sys.stderr.write(
        "vllm-livepatch: this bundle does not serve Python %d.%d: nothing is patched\n" % sys.version_info[:2]
    )
    sys.exit(1)

from _vllm_livepatch.tools.bundled import command  # type: ignore[import-not-found] # noqa: E402

command.main(os.path.dirname(os.path.abspath(__file__)))
