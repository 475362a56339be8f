"""What start-up of a training is compared with: import torch, build the model and the optimizer, do one step.

python -m benchmarks.bare_start '<JobConfig>' <vocabulary> [<file>...]

Files are read into memory before the step, as the least that continuing from a checkpoint takes.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from penstock_trainer.contract.config import parse_args
from penstock_trainer.model.decoder import Decoder


def main() -> None:
    config = parse_args([f"--config={sys.argv[1]}"])
    torch.set_num_threads(1)
    model = Decoder(config.model, int(sys.argv[2]))
    model.initialize(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.learning_rate, fused=True)
    read = [Path(file).read_bytes() for file in sys.argv[3:]]
    assert all(read)
    tokens = torch.randint(int(sys.argv[2]), (config.global_batch, config.data.seq_len + 1))
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
    optimizer.step()
    sys.stdout.write(json.dumps({"event": "step", "loss": loss.item()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
