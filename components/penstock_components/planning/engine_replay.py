"""What an engine adds to a replayed step: the moments at which it takes and gives, and those of an engine that adds nothing."""

from __future__ import annotations

from penstock_components.planning.ledger import Ledger
from penstock_components.planning.placement import FP32, Placement


class EngineReplay:
    """A lone rank, which needs no engine: gradients are added up where backward leaves them. Base of the others."""

    def __init__(self, at: Placement, ledger: Ledger, rank: int) -> None:
        self._at, self._ledger, self._rank = at, ledger, rank
        self._named = {parameter.name: parameter for parameter in at.shape.parameters}
        self._added: set[str] = set()
        """Parameters whose gradient has been kept in this step."""
        self._is_first = self._is_last = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """Forward of a micro-batch begins."""
        self._is_first, self._is_last = is_first, is_last

    def enter(self, block: int) -> None:
        """A block's forward begins."""

    def leave(self, block: int) -> None:
        """A block's forward has ended."""

    def begin_backward(self) -> None:
        """Forward has ended, and backward begins."""

    def enter_backward(self, block: int) -> None:
        """A block's backward begins."""

    def leave_backward(self, block: int) -> None:
        """A block's backward has ended."""

    def make_gradient(self, name: str, item: int) -> None:
        """Autograd makes a parameter's gradient, of `item` bytes an element."""
        self._ledger.take("gradients", item * self._numel(name))

    def add_gradient(self, name: str, item: int) -> None:
        """One that waited, of `item` bytes an element, is added to the one just made."""
        self._ledger.give("gradients", item * self._numel(name))

    def finish_gradient(self, name: str, item: int) -> None:
        """It is the parameter's: kept in fp32, and added to where there is one."""
        self._keep(name, item, FP32)

    def end_backward(self) -> None:
        """Backward of a micro-batch has ended."""

    def step(self) -> None:
        """The optimizer's step; gradients are freed."""
        self._ledger.give("gradients", FP32 * sum(self._numel(name) for name in self._added))
        self._added.clear()

    def _keep(self, name: str, item: int, kept_item: int) -> None:
        numel = self._numel(name)
        if name in self._added:
            self._ledger.give("gradients", item * numel)
            return
        self._added.add(name)
        if item != kept_item:
            self._ledger.take("gradients", kept_item * numel)
            self._ledger.give("gradients", item * numel)

    def _numel(self, name: str) -> int:
        parameter = self._named[name]
        return parameter.numel if parameter.is_trained else 0
