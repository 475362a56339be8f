"""Which parameters ZeRO's stage 3 gathers when, and how many are held by that.

A replay of DeepSpeed's coordinator (deepspeed/runtime/zero/partitioned_param_coordinator.py) over one forward and backward
pass with a complete trace: a module fetches what it lacks, then the parameters that come next in the trace up to
`stage3_prefetch_bucket_size` elements; it gives up what is not used again within `stage3_max_reuse_distance` elements. So a
model smaller than both is gathered at once and once for each micro-batch, and a larger one up to twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock_components.planning.placement import Placement, chunk, numel_of
from penstock_components.planning.shape import ModelShape, Parameter
from penstock_components.planning.states import persistent

_NEVER = -1
Moment = tuple[int | None, bool]
"""A block, None for the rest of the model, and whether it is its forward."""


def gathers(at: Placement) -> list[tuple[Parameter, ...]]:
    """The parameters of each all-gather of one micro-batch, in order."""
    return _replayed(at).fetches


def gathered_numel(at: Placement) -> dict[Moment, int]:
    """Elements held by gathers while each block runs, at the most, without the parameters that are always whole.

    A gather of several parameters is one flat tensor, from which they are copied when the first is needed, and which goes
    when the last has been.
    """
    return _replayed(at).gathered


@dataclass(frozen=True, slots=True)
class _Module:
    """A module that is called, with the parameters that it uses itself."""

    uses: tuple[Parameter, ...] = ()
    children: tuple[_Module, ...] = ()
    block: int | None = None


@dataclass
class _Coordinator:
    at: Placement
    trace: Sequence[tuple[Parameter, ...]]
    """What modules use, in the order in which they are entered: forward, then backward."""
    kept: frozenset[str]
    """Names of those that are always whole."""
    step: int = 0
    """Modules entered."""
    available: dict[str, Parameter] = field(default_factory=dict)
    last_seen: dict[str, int] = field(default_factory=dict)
    """The latest position in the trace for which a parameter was taken off the queue."""
    fetches: list[tuple[Parameter, ...]] = field(default_factory=list)
    awaited: dict[int, set[str]] = field(default_factory=dict)
    """By fetch, the parameters that no module has asked for yet; a fetch of which all have been asked for is gone."""
    copied: set[str] = field(default_factory=set)
    gathered: dict[Moment, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = deque((p, position) for position, uses in enumerate(self.trace) for p in uses)

    def run(self, module: _Module, *, forward: bool) -> None:
        self._fetch(module.uses)
        self._wait(module.uses)
        self._advance(module.uses)
        self._prefetch()
        self._record(module, forward=forward)
        self.step += 1
        for child in module.children if forward else reversed(module.children):
            self.run(child, forward=forward)
        self._release(module.uses)

    def _fetch(self, wanted: Sequence[Parameter]) -> None:
        lacking = {p.name: p for p in wanted if p.name not in self.available and p.name not in self.kept}
        if lacking:
            self.fetches.append(tuple(lacking.values()))
            self.available |= lacking
            self.awaited[len(self.fetches) - 1] = set(lacking)

    def _wait(self, uses: Sequence[Parameter]) -> None:
        names = {parameter.name for parameter in uses}
        for fetch, left in list(self.awaited.items()):
            if names & left:
                self.copied |= {parameter.name for parameter in self.fetches[fetch]}
                left -= names
            if not left:
                del self.awaited[fetch]

    def _record(self, module: _Module, *, forward: bool) -> None:
        flat = sum(self._flat(self.fetches[fetch]) for fetch in self.awaited)
        numel = flat + numel_of(p for name, p in self.available.items() if name in self.copied)
        moment = (module.block, forward)
        self.gathered[moment] = max(self.gathered.get(moment, 0), numel)

    def _flat(self, fetched: Sequence[Parameter]) -> int:
        return self.at.world_size * sum(chunk(parameter.numel, self.at.world_size) for parameter in fetched)

    def _advance(self, uses: Sequence[Parameter]) -> None:
        """Take off the queue what this module uses and no prefetch has taken."""
        left = {p.name for p in uses if self.last_seen.get(p.name, _NEVER) < self.step}
        while self.queue and left:
            parameter, position = self.queue.popleft()
            self.last_seen[parameter.name] = position
            left.discard(parameter.name)

    def _prefetch(self) -> None:
        room = self.at.option("stage3_max_live_parameters") - numel_of(self.available.values())
        most = min(room, self.at.option("stage3_prefetch_bucket_size"))
        chosen: dict[str, Parameter] = {}
        while self.queue and numel_of(chosen.values()) < most:
            parameter, position = self.queue.popleft()
            self.last_seen[parameter.name] = max(self.last_seen.get(parameter.name, _NEVER), position)
            if parameter.name not in self.available and parameter.name not in self.kept:
                chosen[parameter.name] = parameter
        self._fetch(tuple(chosen.values()))

    def _release(self, uses: Sequence[Parameter]) -> None:
        """Give up what no module uses soon, and no prefetch has passed over for a later use."""
        soon = self._soon()
        for parameter in uses:
            if parameter.name not in soon and self.last_seen.get(parameter.name, _NEVER) <= self.step:
                self.available.pop(parameter.name, None)
                self.copied.discard(parameter.name)

    def _soon(self) -> set[str]:
        soon: set[str] = set()
        traversed = 0
        for uses in self.trace[self.step :]:
            if traversed >= self.at.option("stage3_max_reuse_distance"):
                break
            soon |= {parameter.name for parameter in uses}
            traversed += numel_of(uses)
        return soon


def _replayed(at: Placement) -> _Coordinator:
    root = _Module(children=(_model(at.shape),))  # the objective around it has no parameters
    trace = [*_entered(root, forward=True), *_entered(root, forward=False)]
    coordinator = _Coordinator(at, trace, frozenset(parameter.name for parameter in persistent(at)))
    coordinator.run(root, forward=True)
    coordinator.run(root, forward=False)
    return coordinator


def _entered(module: _Module, *, forward: bool) -> Iterator[tuple[Parameter, ...]]:
    yield module.uses
    for child in module.children if forward else reversed(module.children):
        yield from _entered(child, forward=forward)


def _model(shape: ModelShape) -> _Module:
    """The built-in decoder uses its head without calling it as a module, so the head is there as long as the decoder runs
    (DeepSpeed's external parameters)."""
    if shape.decoder is None:
        return _module(shape.parameters, depth=0)
    head = "embed_tokens.weight" if shape.decoder.tie_embeddings else "lm_head.weight"
    inner = [parameter for parameter in shape.parameters if parameter.name != "lm_head.weight"]
    return _Module(tuple(p for p in shape.parameters if p.name == head), _module(inner, depth=0).children)


def _module(members: Sequence[Parameter], *, depth: int) -> _Module:
    """The tree of modules that dotted names tell; a list of modules is not called itself."""
    uses = tuple(parameter for parameter in members if parameter.name.count(".") == depth)
    inner = [parameter for parameter in members if parameter.name.count(".") > depth]
    by_child: dict[str, list[Parameter]] = {}
    for parameter in inner:
        by_child.setdefault(parameter.name.split(".")[depth], []).append(parameter)
    children: list[_Module] = []
    for name in sorted(by_child, key=_place):
        child = _module(by_child[name], depth=depth + 1)
        is_list = all(parameter.name.split(".")[depth + 1].isdigit() for parameter in by_child[name])
        children += child.children if is_list else [child]
    blocks = {parameter.block for parameter in members}
    return _Module(uses, tuple(children), blocks.pop() if len(blocks) == 1 else None)


_ATTENTION = ("q_proj", "k_proj", "q_norm", "k_norm", "v_proj", "o_proj")


def _place(name: str) -> int:
    """Of a module among its siblings where they do not run in the order of their parameters."""
    return _ATTENTION.index(name) if name in _ATTENTION else 0
