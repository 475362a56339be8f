"""What a recipe takes: memory of a rank, bytes of a step, machines that can hold it, hours, money, interruptions.

Memory and traffic are computed from the config (penstock_components.planning); how fast a machine is, what it costs and how
often it is lost are not known to this project: what is not given is said to be missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock_components.jobs.all_reduce import break_even_step_gain, communication_gain, traffic_share
from penstock_components.jobs.messages import ContainerSpec, MachineSpec
from penstock_components.jobs.reducer_sizing import sizing
from penstock_components.jobs.topology import nodes
from penstock_components.planning.goodput import HOUR, Interruptions
from penstock_components.planning.options import GB, Option, options
from penstock_components.planning.prices import Prices
from penstock_components.planning.shape import ModelShape, decoder_shape, shape_from_json
from penstock_components.planning.traffic import sent_bytes
from penstock_pipelines.errors import InputError
from penstock_pipelines.recipe import Recipe
from penstock_trainer.contract.config import JobConfig, Strategy

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp-full", "fsdp-hybrid", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be planned, beside the recipe."""

    machines: tuple[str, ...] = ()
    """Machine types; empty: the recipe's."""
    node_counts: tuple[int, ...] = ()
    """Empty: the recipe's."""
    strategies: tuple[Strategy, ...] = STRATEGIES
    location: str = ""
    tokens: float | None = None
    """To train on; None: steps x global batch x sequence length."""
    tokens_per_second: float | None = None
    """Of one accelerator, measured with this model; None: not known."""
    prices: Prices | None = None
    interruptions: Interruptions | None = None
    reserved_gb: float = 2.0
    """Of each accelerator for its driver, NCCL and the allocator's gaps: an allowance, not a measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What an option takes in time and money; None: what it follows from was not given."""

    hours: float | None
    """Wall time, with the time that interruptions cost where they are given."""
    price: float | None
    """Of all machines over that time, in the price file's currency."""
    goodput: float | None
    interval_seconds: float | None
    """Best time between two checkpoints."""
    interruptions: float | None
    """Expected over the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer."""

    recipe: Recipe
    question: Question
    shape: ModelShape
    tokens: float
    options: tuple[Option, ...]

    def costs(self, option: Option) -> Costs:
        """Of an option of this plan."""
        question, nodes_ = self.question, option.num_nodes
        lost, interval = question.interruptions, None
        goodput = None
        if lost is not None:
            interval = lost.best_interval_seconds(nodes_)
            goodput = lost.goodput(nodes_, interval)
        hours = None
        if question.tokens_per_second and option.world_size and goodput != 0:
            hours = self.tokens / (question.tokens_per_second * option.world_size) / HOUR / (goodput or 1.0)
        return Costs(
            hours=hours,
            price=self._price(option, hours),
            goodput=goodput,
            interval_seconds=interval,
            interruptions=lost.expected(nodes_, hours) if lost is not None and hours is not None else None,
        )

    def _price(self, option: Option, hours: float | None) -> float | None:
        """Of the nodes and, on the recipe's own machines, of its reducers."""
        resources, prices = self.recipe.resources, self.question.prices
        if prices is None or hours is None:
            return None
        parts = [(nodes(_machine(self.recipe, option.machine_type), 1).machine, option.num_nodes)]
        if (
            resources.reduction_server is not None
            and option.machine_type == resources.topology.machine.machine_type
        ):
            server = resources.reduction_server
            parts.append((MachineSpec(machine_type=server.machine_type), server.replica_count))
        each = [(_per_hour(self, machine), count) for machine, count in parts]
        known = [price * count for price, count in each if price is not None]
        return sum(known) * hours if len(known) == len(each) else None

    def to_json(self) -> str:
        """For programs; sizes in bytes."""
        told = {
            "recipe": self.recipe.name,
            "parameters": self.shape.num_parameters,
            "tokens": self.tokens,
            "currency": self.question.prices.currency if self.question.prices else None,
            "options": [{**_told(option), **asdict(self.costs(option))} for option in self.options],
        }
        return json.dumps(told, indent=2)


def plan(recipe: Recipe, question: Question) -> Plan:
    """Raises InputError for a model whose shape cannot be learned."""
    config, resources = recipe.config, recipe.resources
    shape = model_shape(config, recipe.vocab_size)
    machines: Sequence[str | MachineSpec] = [_machine(recipe, name) for name in question.machines]
    found = options(
        config,
        shape,
        machines=machines or [resources.machine],
        node_counts=question.node_counts or [resources.num_nodes],
        strategies=question.strategies,
        reserved_bytes=int(question.reserved_gb * GB),
    )
    of_recipe = float(config.steps * config.global_batch * config.data.seq_len)
    return Plan(
        recipe=recipe,
        question=question,
        shape=shape,
        tokens=question.tokens or of_recipe,
        options=tuple(found),
    )


def model_shape(config: JobConfig, vocab_size: int) -> ModelShape:
    """Of the built-in decoder by its formulas; of any other model by asking the trainer, which needs torch.

    Raises InputError, with the trainer's words, when it cannot make the model.
    """
    if not config.model.source:
        return decoder_shape(config.model, vocab_size)
    command = [sys.executable, "-m", "penstock_trainer.model_shape", f"--config={config.to_json()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise InputError(f"the shape of {config.model.source} cannot be learned: {last[0]}")
    return shape_from_json(done.stdout)


def _machine(recipe: Recipe, machine_type: str) -> str | MachineSpec:
    """The recipe's own where it is meant: N1 carries other accelerators too."""
    own = recipe.resources.machine
    return own if isinstance(own, MachineSpec) and own.machine_type == machine_type else machine_type


def _told(option: Option) -> Mapping[str, Any]:
    told: dict[str, Any] = {
        "machine_type": option.machine_type,
        "num_nodes": option.num_nodes,
        "strategy": option.strategy,
        "world_size": option.world_size,
        "feasible": option.is_feasible,
        "reason": option.reason,
        "memory_limit_bytes": option.memory_limit or None,
        "memory": None,
        "traffic": [asdict(each) | {"sent_bytes": sent_bytes(each)} for each in option.traffic],
    }
    if option.memory is not None:
        told["memory"] = asdict(option.memory) | {
            "device_bytes": option.memory.device,
            "host_bytes": option.memory.host,
        }
    return told


def lines(made: Plan) -> Iterator[str]:
    """What is said besides the tables: what follows from figures that were given, or which are missing."""
    question = made.question
    yield from _reducers(made)
    if made.shape.decoder is None:
        yield "memory: model states only; what a step needs beside them is known of the built-in decoder alone"
    for name in dict.fromkeys(
        name for each in made.options if each.memory for name in each.memory.unmodelled
    ):
        yield f"memory: what {name} changes is not in the peak"
    if question.tokens_per_second is None:
        yield "hours: not known; give --tokens-per-second of one accelerator, measured with this model"
    if question.prices is None:
        yield "cost: not known; give --prices FILE (docs/prices.md)"
    if question.interruptions is None and made.recipe.resources.strategy == "SPOT":
        yield "interruptions: not known; no rate is published for Spot. Give --node-mtbf-hours, as you have seen it"


def _reducers(made: Plan) -> Iterator[str]:
    """What the recipe's Reduction Server brings on its own machines, and from which gain it pays."""
    resources = made.recipe.resources
    server, strategy = resources.reduction_server, made.recipe.config.engine.strategy
    sized = sizing(resources.pools(ContainerSpec(), location=made.question.location or "us-central1"))
    if server is None or sized is None:
        return
    yield f"reducers: {sized.told}"
    share = traffic_share(strategy)
    if share is not None and sized.gain is not None:
        whole = communication_gain(share.share, sized.gain)
        yield f"reducers: of {strategy}, {share.reason}; all its communication becomes {whole:.2f}x as fast"
    count = server.replica_count
    hours = f"reducers: they add {count} to {sized.num_nodes} machine hours"
    node, reducer = resources.topology.machine, MachineSpec(machine_type=server.machine_type)
    node_price, reducer_price = _per_hour(made, node), _per_hour(made, reducer)
    if not node_price or reducer_price is None:
        yield f"{hours}; what step gain pays for them follows from prices"
        return
    least = break_even_step_gain(
        num_nodes=sized.num_nodes, num_reducers=count, node_price=node_price, reducer_price=reducer_price
    )
    yield f"{hours}, and pay for themselves when a step becomes more than {least:.2f}x as fast"


def _per_hour(made: Plan, machine: MachineSpec) -> float | None:
    prices = made.question.prices
    strategy = made.recipe.resources.strategy
    return prices.per_hour(machine, region=made.question.location, strategy=strategy) if prices else None
