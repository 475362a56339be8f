"""A block of the model in a replayed step: its operations forward and backward, and the tensors that live between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock_components.planning.engine_replay import EngineReplay
from penstock_components.planning.ledger import Ledger
from penstock_components.planning.operations import Operation


class Tensors:
    """Tensors by name, each alive as long as it has holders."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sizes: dict[str, int] = {}
        self._holders: Counter[str] = Counter()

    def make(self, name: str, size: int) -> None:
        """With a first holder."""
        self._ledger.take("activations", size)
        self.adopt(name, size)

    def adopt(self, name: str, size: int) -> None:
        """One that is in the ledger."""
        self._sizes[name] = size
        self._holders[name] = 1

    def hold(self, name: str) -> None:
        """With one holder more."""
        self._holders[name] += 1

    def drop(self, name: str) -> None:
        """With one holder fewer; without any it is freed."""
        self._holders[name] -= 1
        if not self._holders[name]:
            self._ledger.give("activations", self._sizes.pop(name))
            del self._holders[name]

    def leave(self, name: str) -> None:
        """To the caller, who frees it."""
        self._holders[name] -= 1
        assert not self._holders[name], f"{name} is still used"
        del self._sizes[name], self._holders[name]

    def __contains__(self, name: str) -> bool:
        return name in self._sizes


class Block:
    """The operations of one block and the tensors that live from its forward to its backward."""

    def __init__(
        self,
        operations: Sequence[Operation],
        checkpointing: str,
        ledger: Ledger,
        engine: EngineReplay,
        *,
        prefix: str,
        item: int,
    ) -> None:
        self._operations = operations
        self._recomputes = checkpointing != "none"
        self._caches = (
            {op.output for op in operations if op.is_costly} if checkpointing == "selective" else set()
        )
        self._ledger, self._engine, self._prefix, self._item = ledger, engine, prefix, item
        self._tensors = Tensors(ledger)
        self._input, self._output = operations[0].inputs[0], operations[-1].output
        self._input_size = operations[-1].size  # a block keeps the width of the residual stream

    def forward(self) -> None:
        """From the input, which the caller has made, to the output, which is the caller's."""
        tensors = self._tensors
        tensors.adopt(self._input, self._input_size)
        if self._recomputes:
            tensors.hold(self._input)
        self._run(self._operations, saves=not self._recomputes)
        tensors.leave(self._output)

    def backward(self) -> None:
        """From the gradient of the output, which the caller has made, to that of the input, which is the caller's."""
        if self._recomputes:
            self._recompute()
        gradients = Tensors(self._ledger)
        gradients.adopt("gradient", self._input_size)
        of = {self._output: "gradient"}
        for operation in reversed(self._operations):
            self._backward(operation, gradients, of)
        gradients.leave(of[self._input])
        for name in self._caches:
            if name in self._tensors:
                self._tensors.drop(name)

    def _recompute(self) -> None:
        """Up to the last tensor that backward reads."""
        last = max(
            index for index, operation in enumerate(self._operations) if operation.saved or operation.extra
        )
        self._tensors.hold(self._input)
        self._run(self._operations[:last], saves=True)
        final = self._operations[last]
        for name in final.saved:
            self._tensors.hold(name)
        self._ledger.take("activations", final.extra)
        for name in self._unused(self._operations[:last]):
            self._tensors.drop(name)
        self._tensors.drop(self._input)

    def _unused(self, operations: Sequence[Operation]) -> Iterable[str]:
        """What was made for operations that are not run."""
        used = {name for operation in operations for name in operation.inputs}
        return [operation.output for operation in operations if operation.output not in used]

    def _run(self, operations: Sequence[Operation], *, saves: bool) -> None:
        """Each tensor is held by its maker until the last operation that reads it has run."""
        last_use = {name: index for index, operation in enumerate(operations) for name in operation.inputs}
        for index, operation in enumerate(operations):
            self._make(operation, saves=saves)
            self._ledger.pass_through("activations", operation.work)
            for name in set(operation.inputs):
                if last_use[name] == index:
                    self._tensors.drop(name)

    def _make(self, operation: Operation, *, saves: bool) -> None:
        is_cached = operation.output in self._caches
        if not (saves and is_cached):  # else the cache's hold becomes the maker's
            self._tensors.make(operation.output, operation.size)
        if saves:
            for name in operation.saved:
                self._tensors.hold(name)
            self._ledger.take("activations", operation.extra)
        elif is_cached:
            self._tensors.hold(operation.output)

    def _backward(self, operation: Operation, gradients: Tensors, of: dict[str, str]) -> None:
        arriving = of.pop(operation.output)
        if operation.is_sum:
            for name in operation.inputs:
                self._pass_on(name, arriving, gradients, of)
        else:
            for weight in operation.weights:
                self._engine.make_gradient(self._prefix + weight, self._item)
            for name in operation.inputs:
                self._make_gradient(name, gradients, of)
            self._ledger.pass_through("activations", operation.backward_work)
        for name in operation.saved:
            self._tensors.drop(name)
        self._ledger.give("activations", operation.extra)
        gradients.drop(arriving)
        for weight in operation.weights:
            self._engine.finish_gradient(self._prefix + weight, self._item)

    def _pass_on(self, name: str, arriving: str, gradients: Tensors, of: dict[str, str]) -> None:
        """The gradient of a sum is that of its terms; a second gradient is added to the first in place."""
        if name not in of:
            of[name] = arriving
            gradients.hold(arriving)

    def _make_gradient(self, name: str, gradients: Tensors, of: dict[str, str]) -> None:
        size = self._size_of(name)
        if name in of:
            self._ledger.pass_through("activations", size)
            return
        of[name] = f"gradient of {name}"
        gradients.make(of[name], size)

    def _size_of(self, name: str) -> int:
        if name == self._input:
            return self._input_size
        operation = next(operation for operation in self._operations if operation.output == name)
        return operation.size or self._size_of(operation.inputs[0])
