"""`python -m batchrun` is the `batchrun` command."""

import sys

from batchrun.cli import main

sys.exit(main())
