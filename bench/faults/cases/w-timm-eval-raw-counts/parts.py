"""The parts of timm that need no torchvision, file by file: `import timm` would want all of it."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

ROOM = Path(importlib.util.find_spec("timm").origin).parent

if importlib.util.find_spec("torchvision") is None:
    for name in ("timm", "timm.utils", "timm.optim"):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOM.parent.joinpath(*name.split(".")))]
        sys.modules[name] = package

NativeScaler = importlib.import_module("timm.utils.cuda").NativeScaler
ModelEmaV3 = importlib.import_module("timm.utils.model_ema").ModelEmaV3
