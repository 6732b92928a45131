"""Regions in float32: by module pattern, as a decorator, as a context manager.

A bare `.float()` inside autocast is undone by the next matrix product. Here the inputs are cast to float32, autocast is
left, and the results are cast back to the type of the inputs.
"""

from ampguard.engine.force_fp32.front import force_fp32
from ampguard.engine.force_fp32.modules import ForcedModules, force_modules
from ampguard.engine.force_fp32.region import call_in_fp32, outside_autocast

__all__ = ["ForcedModules", "call_in_fp32", "force_fp32", "force_modules", "outside_autocast"]
