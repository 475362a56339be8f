"""The blocks of a model: the parts that are sharded, recomputed and compiled as one."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from penstock_trainer.contract.sections.engine import ActivationCheckpointing, EngineConfig
from penstock_trainer.errors import EngineError

logger = logging.getLogger(__name__)

_PARTS_BY_SIZE = 8

_aten = torch.ops.aten
# What costs more to compute than to keep: products of matrices and attention.
_KEPT_BY_SELECTIVE = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def prepare_blocks(model: nn.Module, engine: EngineConfig) -> list[nn.Module]:
    """The model's blocks, to be recomputed and compiled as the config says. To be called before they are sharded.

    Raises EngineError as `find_blocks` does.
    """
    blocks, reason = find_blocks(model, engine.wrap_class)
    logger.info("blocks=%d (%s)", len(blocks), reason)
    for block in blocks:
        recompute(block, engine.activation_checkpointing)
        if engine.compile:
            block.compile()
    return blocks


def find_blocks(model: nn.Module, wrap_class: str = "") -> tuple[list[nn.Module], str]:
    """The model's blocks in order, and the reason for the choice.

    By class where `wrap_class` or the model itself (`_no_split_modules` of Hugging Face's) names one, else the items of
    the largest ModuleList of one class, else by size: the outermost modules with at most an eighth of the parameters.
    A block that shares a parameter with the rest of the model stays with the rest. Raises EngineError when no module is
    of `wrap_class`.
    """
    named = {wrap_class} if wrap_class else set(getattr(model, "_no_split_modules", None) or ())
    chosen = [module for module in model.modules() if type(module).__name__ in named]
    if wrap_class and not chosen:
        known = Counter(
            type(module).__name__ for module in model.modules() if any(True for _ in module.parameters())
        )
        told = ", ".join(f"{name} ({count})" for name, count in known.most_common(8))
        raise EngineError(
            f"engine.wrap_class = {wrap_class!r} is the class of no module of {type(model).__name__}. Classes there: {told}."
        )
    reason = f"of class {' or '.join(sorted(named))}"
    if not chosen:
        chosen, reason = _largest_list(model)
    if not chosen:
        chosen, reason = list(_by_size(model)), f"of at most 1/{_PARTS_BY_SIZE} of the parameters"
    return _unshared(model, _outermost(chosen)), reason


def recompute(block: nn.Module, mode: ActivationCheckpointing) -> None:
    """Have a block's backward pass compute its activations again: all, or in `selective` mode the cheap ones.

    The block's `forward` is replaced on the instance: names of parameters stay what they are. Random numbers are drawn
    again as they were.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT_BY_SELECTIVE)
    forward: Callable[..., Any] = block.forward
    block.forward = functools.partial(checkpoint, forward, **options)


def _largest_list(model: nn.Module) -> tuple[list[nn.Module], str]:
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(item) for item in module}) == 1
    ]
    if not lists:
        return [], ""
    name, largest = max(lists, key=lambda found: _size(found[1]))
    return list(largest), f"items of {name}, its largest list of one class"


def _by_size(model: nn.Module) -> Iterator[nn.Module]:
    limit = _size(model) // _PARTS_BY_SIZE
    for child in model.children():
        if 0 < _size(child) <= limit:
            yield child
        else:
            yield from _by_size_within(child, limit)


def _by_size_within(module: nn.Module, limit: int) -> Iterator[nn.Module]:
    children = list(module.children())
    if not children and _size(module):
        yield module
    for child in children:
        if 0 < _size(child) <= limit:
            yield child
        else:
            yield from _by_size_within(child, limit)


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _unshared(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    kept = []
    for block in blocks:
        within = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
        if all(uses[key] == count for key, count in within.items()):
            kept.append(block)
    return kept


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
