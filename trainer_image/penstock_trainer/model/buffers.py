"""What a model keeps besides its parameters, as the running statistics of BatchNorm: state of a run too.

Each rank's statistics are of its own samples. Training does not read them; evaluation and export do, so before state is
evaluated, saved or exported every rank takes the mean over all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By name, those that belong to the model's state_dict; the live tensors."""
    return dict(_persistent(model))


def average_buffers(model: nn.Module) -> None:
    """Floating point buffers become their mean over all ranks; the others count steps and are alike. Collective."""
    for _, buffer in _persistent(model):
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        left_out = module._non_persistent_buffers_set  # torch has no public name for it
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in left_out:
                yield name, buffer
