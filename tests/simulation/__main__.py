"""`python -m tests.simulation`."""

from tests.simulation.command import main

raise SystemExit(main())
