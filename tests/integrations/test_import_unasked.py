"""Drop-ins are imported when asked for, and import no framework that is not there already."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import ampguard
ampguard.Amp
assert not [m for m in sys.modules if m.startswith("ampguard.integrations")], "unasked"
import ampguard.integrations.timm, ampguard.integrations.arguments, ampguard.integrations.d2
frameworks = {"timm", "detectron2", "fastreid", "lightning", "transformers", "accelerate", "ampguard.run.session"}
assert not frameworks & set(sys.modules), frameworks & set(sys.modules)
"""


def test_nothing_is_imported_unasked() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], check=True)
