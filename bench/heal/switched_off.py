"""`ampguard` that heals by switching autocast off for good: what float32 can still do from the failing step on.

python -m bench.heal.switched_off run --on-nonfinite heal train.py
"""

from __future__ import annotations

from ampguard.cli import main
from ampguard.run.overrides import healing

if __name__ == "__main__":
    healing.SMALLEST_FIRST = tuple(sorted(healing.SMALLEST_FIRST, key=lambda action: action != "disable-amp"))
    main()
