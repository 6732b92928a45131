from dataclasses import dataclass


@dataclass
class TrainConfig:
    epochs: int = 3
    batch_size: int = 4
    grad_accum_steps: int = 4
    lr: float = 3e-3
    max_grad_norm: float = 1.0
    warmup_updates: int = 4
    amp: bool = True
    seed: int = 0
