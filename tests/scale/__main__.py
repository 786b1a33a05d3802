"""`python -m tests.scale`."""

import sys

from tests.scale.command import main

sys.exit(main())
