"""One training step, replayed with the bytes of its tensors: forward, backward and the optimizer's step.

The order in which tensors are made and freed is that of torch 2.13's autograd for penstock_trainer.model.decoder and
penstock_trainer.model.objective. What an engine adds, gathered parameters and what becomes of gradients, is in
`torch_replay` and `zero_replay`. What a kernel needs only within itself is not seen, nor what torch.compile saves.
"""

from __future__ import annotations

from penstock_components.planning.block_replay import Block
from penstock_components.planning.engine_replay import EngineReplay
from penstock_components.planning.ledger import Ledger
from penstock_components.planning.operations import Sizes, layer_operations, norm
from penstock_components.planning.placement import FP32, Placement
from penstock_trainer.contract.config import ModelConfig

_INT64 = 8


def replay_step(at: Placement, model: ModelConfig, ledger: Ledger, engine: EngineReplay) -> None:
    """Take and give what an optimizer step does. What is held between steps is in the ledger already."""
    sizes = Sizes.of(at)
    batch = _INT64 * at.micro_batch * at.accumulation * (at.config.data.seq_len + 1)
    ledger.take("other", batch)
    micro_batch = _MicroBatch(at, model, ledger, engine, sizes)
    for index in range(at.accumulation):
        engine.begin(is_first=index == 0, is_last=index == at.accumulation - 1)
        micro_batch.forward()
        micro_batch.backward()
    engine.step()
    ledger.give("other", batch)


class _MicroBatch:
    def __init__(
        self, at: Placement, model: ModelConfig, ledger: Ledger, engine: EngineReplay, sizes: Sizes
    ) -> None:
        self._at, self._model, self._ledger, self._engine, self._sizes = at, model, ledger, engine, sizes
        self._width = sizes.tokens * model.dim
        operations = layer_operations(model, sizes)
        mode = at.engine.activation_checkpointing
        self._layers = [
            Block(operations, mode, ledger, engine, prefix=f"layers.{index}.", item=sizes.item)
            for index in range(model.num_layers)
        ]
        final = norm("x", "hidden", "norm.weight", dim=model.dim, count=1, sizes=sizes)
        self._final = Block([final], "none", ledger, engine, prefix="", item=sizes.item)
        self._angles = 2 * FP32 * at.config.data.seq_len * (model.dims_per_head // 2)
        self._labels = _INT64 * sizes.tokens  # flattened
        self._head = "embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"

    def forward(self) -> None:
        self._ledger.take("other", self._angles)
        self._ledger.take("activations", self._width * self._sizes.residual_item)  # the embedded tokens
        for index, layer in enumerate(self._layers):
            self._engine.enter(index)
            layer.forward()
            self._engine.leave(index)
        self._final.forward()
        if self._at.engine.loss_chunk_tokens:
            self._chunked_loss()
        else:
            self._whole_loss()

    def backward(self) -> None:
        self._engine.begin_backward()
        if self._at.engine.loss_chunk_tokens:
            self._chunked_gradient()
        else:
            self._whole_gradient()
        self._final.backward()
        for index, layer in reversed(list(enumerate(self._layers))):
            self._engine.enter_backward(index)
            layer.backward()
            self._engine.leave_backward(index)
        self._ledger.give("other", self._angles)
        self._embedding_gradient()
        self._engine.end_backward()

    @property
    def _logits(self) -> int:
        """Elements."""
        return self._sizes.tokens * self._at.shape.vocab_size

    @property
    def _cast(self) -> int:
        """Bytes of the narrow copy that the head reads under autocast; 0 without."""
        sizes = self._sizes
        return self._width * sizes.item if sizes.item != sizes.residual_item else 0

    def _whole_loss(self) -> None:
        """Logits, in fp32 too where they are narrow, and their log-softmax, which backward reads."""
        ledger, narrow, wide = self._ledger, self._sizes.item * self._logits, FP32 * self._logits
        made = narrow if narrow == wide else narrow + wide
        ledger.take("activations", self._cast)
        if self._cast:
            ledger.give("activations", self._width * self._sizes.residual_item)
        ledger.take("logits", made)
        ledger.take("other", self._labels)
        ledger.take("logits", wide)
        ledger.give("logits", made)

    def _whole_gradient(self) -> None:
        """Of log-softmax and of logits (aten's nll_loss_backward, _log_softmax_backward_data), then of head and hidden."""
        ledger, narrow, wide = self._ledger, self._sizes.item * self._logits, FP32 * self._logits
        ledger.take("logits", wide)
        ledger.give("other", self._labels)
        ledger.take("logits", wide)
        ledger.give("logits", 2 * wide)
        if narrow != wide:
            ledger.take("logits", narrow)
            ledger.give("logits", wide)
        read = self._cast or self._width * self._sizes.residual_item
        self._engine.make_gradient(self._head, self._sizes.item)
        ledger.take("activations", read)
        ledger.give("activations", read)  # the hidden states go, their gradient stays
        ledger.give("logits", narrow)
        if self._cast:
            ledger.take("activations", self._width * self._sizes.residual_item)
            ledger.give("activations", self._cast)
        if not self._model.tie_embeddings:
            self._engine.finish_gradient(self._head, self._sizes.item)

    @property
    def _chunk_gradients(self) -> int:
        """Bytes of the gradients of hidden and head that forward leaves to backward."""
        head = self._at.shape.vocab_size * self._model.dim
        return self._width * self._sizes.residual_item + FP32 * head

    def _chunked_loss(self) -> None:
        """Gradients are made in forward, a chunk's logits at a time (penstock_trainer.model.linear_loss). A chunk's logits
        go when the next one's are there."""
        sizes, tokens = self._sizes, min(self._at.engine.loss_chunk_tokens, self._sizes.tokens)
        logits = FP32 * tokens * self._at.shape.vocab_size
        copies = 0 if sizes.item == FP32 else 2 * sizes.item * tokens * self._at.shape.vocab_size
        several = 2 if sizes.tokens > tokens else 1
        head = self._at.shape.vocab_size * self._model.dim
        cast = sizes.item * head if self._cast else 0
        self._ledger.take("logits", self._chunk_gradients + cast)
        self._ledger.take("other", self._labels)
        self._ledger.pass_through("logits", several * logits + copies)
        self._ledger.pass_through("logits", logits + copies + sizes.item * head)
        self._ledger.give("other", self._labels)
        self._ledger.give("logits", cast)
        self._ledger.give("activations", self._width * self._sizes.residual_item)

    def _chunked_gradient(self) -> None:
        """They are scaled in fp32, and narrowed after that."""
        item, head = self._sizes.residual_item, FP32 * self._at.shape.vocab_size * self._model.dim
        is_narrow = item != FP32
        self._ledger.pass_through("logits", 2 * FP32 * self._width if is_narrow else 0)
        self._ledger.take("activations", self._width * item)
        self._ledger.take("logits", head if is_narrow else 0)
        self._engine.make_gradient(self._head, item)
        self._ledger.give("logits", self._chunk_gradients + (head if is_narrow else 0))
        if not self._model.tie_embeddings:
            self._engine.finish_gradient(self._head, item)

    def _embedding_gradient(self) -> None:
        """A tied embedding's gradient as a head has waited for this one, to which it is added."""
        name, item = "embed_tokens.weight", self._sizes.residual_item
        self._engine.make_gradient(name, item)
        self._ledger.give("activations", self._width * self._sizes.residual_item)
        if self._model.tie_embeddings:
            is_chunked = self._at.engine.loss_chunk_tokens > 0
            self._engine.add_gradient(name, item if is_chunked else self._sizes.item)
        self._engine.finish_gradient(name, item)
