from pathlib import Path

import torch


class Checkpointer:
    """Saves a model and whatever else it is told of, each by its own state_dict()."""

    def __init__(self, model, save_dir, **checkpointables):
        self.model, self.save_dir, self.checkpointables = model, Path(save_dir), checkpointables

    def save(self, name, **extra):
        data = {"model": self.model.state_dict()}
        for key, thing in self.checkpointables.items():
            data[key] = thing.state_dict()
        data.update(extra)
        path = self.save_dir / f"{name}.pth"
        torch.save(data, path)
        (self.save_dir / "last_checkpoint").write_text(path.name)

    def resume(self):
        marker = self.save_dir / "last_checkpoint"
        if not marker.is_file():
            return {}
        data = torch.load(self.save_dir / marker.read_text(), weights_only=True)
        self.model.load_state_dict(data.pop("model"))
        for key, thing in self.checkpointables.items():
            thing.load_state_dict(data.pop(key))
        return data
