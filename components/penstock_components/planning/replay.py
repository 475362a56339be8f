"""One training step, replayed with the bytes of its tensors: forward, backward and the optimizer's step.

The order of what is made and freed is that of torch 2.13's autograd for penstock_trainer.model.decoder and
penstock_trainer.model.objective. What an engine adds to it, gathered parameters and what becomes of gradients, is in
`penstock_components.planning.engines`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock_components.planning.engines import EngineReplay
from penstock_components.planning.ledger import Kind, Ledger
from penstock_components.planning.operations import Operation, Sizes, layer_operations, norm
from penstock_components.planning.placement import FP32, Placement
from penstock_trainer.contract.config import ModelConfig

_INT64 = 8


def replay_step(at: Placement, model: ModelConfig, ledger: Ledger, engine: EngineReplay) -> None:
    """Take and give what one optimizer step does. The states that are held between steps are in the ledger already."""
    sizes = Sizes.of(at)
    batch = 2 * _INT64 * sizes.tokens * at.accumulation  # ids and labels
    ledger.take("other", batch)
    for index in range(at.accumulation):
        _MicroBatch(at, model, ledger, engine, sizes).run(is_first=index == 0, is_last=index == at.accumulation - 1)
    engine.step()
    ledger.give("other", batch)


class _MicroBatch:
    def __init__(
        self, at: Placement, model: ModelConfig, ledger: Ledger, engine: EngineReplay, sizes: Sizes
    ) -> None:
        self._at, self._model, self._ledger, self._engine, self._sizes = at, model, ledger, engine, sizes
        self._operations = layer_operations(model, sizes)
        self._residual = sizes.tokens * model.dim * sizes.residual_item
        self._layers = [
            _Layer(self._operations, at.engine.activation_checkpointing, ledger, engine, f"layers.{index}.")
            for index in range(model.num_layers)
        ]
        final = norm("norm", "x", "hidden", "norm.weight", dim=model.dim, count=1, sizes=sizes)
        self._final = _Layer([final], "none", ledger, engine, "")

    def run(self, *, is_first: bool, is_last: bool) -> None:
        angles = 2 * FP32 * self._at.config.data.seq_len * self._model.dims_per_head // 2
        self._engine.begin(is_first=is_first, is_last=is_last)
        self._ledger.take("other", angles)
        self._ledger.take("activations", self._residual)  # the embedded tokens
        for index, layer in enumerate(self._layers):
            self._engine.enter(index)
            layer.forward()
            self._engine.leave(index)
        self._final.forward()
        self._engine.begin_backward()
        self._head_and_loss()
        self._final.backward()
        for index, layer in reversed(list(enumerate(self._layers))):
            self._engine.enter_backward(index)
            layer.backward()
            self._engine.leave_backward(index)
        self._ledger.give("other", angles)
        self._engine.gradient("embed_tokens.weight", source=self._residual)
        self._engine.end_backward()

    def _head_and_loss(self) -> None:
        """From `hidden`, which is given up, to its gradient, of the same size."""
        hidden = self._sizes.tokens * self._model.dim * self._sizes.residual_item
        if self._at.engine.loss_chunk_tokens:
            self._chunked(hidden)
        else:
            self._whole_logits(hidden)

    def _whole_logits(self, hidden: int) -> None:
        """Logits, their log-softmax, which backward reads, and two gradients of that size (aten's nll_loss_backward and
        _log_softmax_backward_data), in fp32; narrow logits have a copy for that."""
        ledger, sizes = self._ledger, self._sizes
        numel = sizes.tokens * self._at.shape.vocab_size
        wide, narrow = FP32 * numel, sizes.item * numel
        cast = sizes.tokens * self._model.dim * sizes.item if sizes.item != sizes.residual_item else 0
        ledger.take("activations", cast)
        ledger.take("logits", narrow)
        if narrow != wide:
            ledger.take("logits", wide)
        ledger.take("logits", wide)  # log-softmax
        ledger.give("logits", narrow if narrow == wide else narrow + wide)
        ledger.take("logits", wide)  # gradient of the log-softmax
        ledger.take("logits", wide)  # gradient of the logits
        ledger.give("logits", 2 * wide)
        if narrow != wide:
            ledger.take("logits", narrow)
            ledger.give("logits", wide)
        gradient = cast or hidden
        ledger.take("activations", gradient)
        self._engine.make_gradient(self._head)
        ledger.give("logits", narrow)
        ledger.give("activations", cast or hidden)
        if cast:
            ledger.pass_through("activations", hidden)
            ledger.take("activations", hidden - gradient)
            ledger.give("activations", hidden)
        self._engine.finish_gradient(self._head)

    def _chunked(self, hidden: int) -> None:
        """Gradients of hidden and head are made in forward, chunk by chunk (penstock_trainer.model.linear_loss)."""
        ledger, sizes, engine = self._ledger, self._sizes, self._at.engine
        chunk = min(engine.loss_chunk_tokens, sizes.tokens)
        several = 2 if sizes.tokens > chunk else 1
        head = self._at.shape.vocab_size * self._model.dim
        logits = FP32 * chunk * self._at.shape.vocab_size
        narrow = 0 if sizes.item == FP32 else sizes.item * chunk * self._at.shape.vocab_size
        ledger.take("logits", hidden + FP32 * head)
        ledger.pass_through("logits", several * (logits + narrow))
        ledger.pass_through("logits", logits + narrow + sizes.item * head)
        ledger.give("activations", hidden)
        ledger.take("activations", hidden)
        self._engine.make_gradient(self._head)
        ledger.pass_through("logits", 0 if sizes.item == FP32 else FP32 * head)
        ledger.give("logits", hidden + FP32 * head)
        self._engine.finish_gradient(self._head)

    @property
    def _head(self) -> str:
        return "embed_tokens.weight" if self._model.tie_embeddings else "lm_head.weight"


class _Layer:
    """The operations of one block, forward and backward, with the tensors that live between them."""

    def __init__(
        self,
        operations: Sequence[Operation],
        checkpointing: str,
        ledger: Ledger,
        engine: EngineReplay,
        prefix: str,
    ) -> None:
        self._operations = operations
        self._recomputes = checkpointing != "none"
        self._keeps_costly = checkpointing == "selective"
        self._ledger = ledger
        self._engine = engine
        self._prefix = prefix
        self._size = {operation.output: operation.size for operation in operations}
        self._holders: Counter[str] = Counter()
        self._cached: set[str] = set()
        self._source = operations[0].inputs[0]

    def forward(self) -> None:
        """From the input, which the caller has taken, to the output, which the next one gives up."""
        self._run(saves=not self._recomputes, caches=self._keeps_costly)

    def backward(self) -> None:
        """From the gradient of the output, which is there, to that of the input."""
        if self._recomputes:
            self._recompute()
        self._gradients()

    def _recompute(self) -> None:
        self._run(saves=True, caches=False)
        self._ledger.give("activations", self._size[self._operations[-1].output])

    def _run(self, *, saves: bool, caches: bool) -> None:
        uses = Counter(name for operation in self._operations for name in operation.inputs)
        self._holders[self._source] += uses[self._source] + (1 if self._recomputes and not saves else 0)
        for operation in self._operations:
            self._make(operation, uses[operation.output])
            self._ledger.pass_through("activations", operation.work)
            if saves:
                for name in operation.saved:
                    self._holders[name] += 1
                self._ledger.take("activations", operation.extra)
            elif caches and operation.is_costly:
                self._cached.add(operation.output)
                self._holders[operation.output] += 1
                self._ledger.take("activations", operation.extra)
            for name in operation.inputs:
                self._drop(name)
