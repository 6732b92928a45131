"""`python -m ampguard`, also for torchrun: `torchrun ... -m ampguard run train.py`."""

from __future__ import annotations

import sys

from ampguard.cli import main

if __name__ == "__main__":
    sys.exit(main())
