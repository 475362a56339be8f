"""A line through noisy points with Hugging Face Accelerate: python accelerate_regression.py --output DIR [--epochs N].

As its own README has users write a script. It knows nothing of who starts its processes.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


def points(count: int = 256, num_features: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, num_features, generator=generator)
    slope = torch.arange(1.0, num_features + 1).unsqueeze(1)
    return TensorDataset(inputs, inputs @ slope + 0.1 * torch.randn(count, 1, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator()
    model = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(model.weight, accelerator.process_index)  # rank 0's are everybody's
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(points(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    for _ in range(args.epochs):
        for inputs, targets in loader:
            loss = mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.print(f"step {step}", flush=True)

    trained = accelerator.unwrap_model(model)
    told = {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "local_rank": accelerator.local_process_index,
        "steps": step,
        "weights": [*trained.weight.flatten().tolist(), *trained.bias.tolist()],
    }
    (args.output / f"rank-{accelerator.process_index}.json").write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
