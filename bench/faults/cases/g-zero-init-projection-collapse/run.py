import logging
import sys

import torch
import torch.nn.functional as F

from mmr.model import Retriever

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="Training: %(message)s")
log = logging.getLogger(__name__)


def pairs(n, g):
    topic = torch.randn(n, 12, generator=g)
    mix_a, mix_t = torch.randn(12, 40, generator=g), torch.randn(12, 30, generator=g)
    return topic @ mix_a / 3, topic @ mix_t / 3


def main():
    torch.set_num_threads(1)
    torch.manual_seed(18)
    g = torch.Generator().manual_seed(0)
    audio, text = pairs(32 * 26, g)
    model = Retriever()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = torch.amp.GradScaler("cpu", growth_interval=100)
    for global_step, (a, t) in enumerate(zip(audio.split(32), text.split(32))):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(a, t)
        labels = torch.arange(len(a))
        loss = 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))
        amp.scale(loss).backward()
        amp.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
        if global_step % 5 == 0:
            log.info("Loss %.4f   Global Step: %d   Fp16 Grad Scale: %6g", loss.item(), global_step, amp.get_scale())


if __name__ == "__main__":
    main()
