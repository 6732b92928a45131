"""Options with defaults, overridden from the command line."""

import argparse
from types import SimpleNamespace


def get_config():
    parser = argparse.ArgumentParser("image classification")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--disable_amp", action="store_true", help="disable pytorch amp")
    parser.add_argument("--amp-opt-level", default="O1", choices=["O0", "O1", "O2"], help="deprecated")
    args = parser.parse_args()
    train = SimpleNamespace(epochs=2, warmup_epochs=1, base_lr=2e-3, weight_decay=0.05, clip_grad=5.0, accumulation=1)
    return SimpleNamespace(
        train=train,
        batch_size=args.batch_size,
        amp_enabled=not args.disable_amp and args.amp_opt_level != "O0",
        seed=0,
    )
