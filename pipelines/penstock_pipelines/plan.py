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

from penstock_components.jobs.messages import MachineSpec
from penstock_components.planning.goodput import HOUR, Interruptions
from penstock_components.planning.options import (
    GB,
    Option,
    machine_name,
    machine_named,
    machine_spec,
    options,
)
from penstock_components.planning.prices import Prices
from penstock_components.planning.shape import ModelShape, decoder_shape, shape_from_json
from penstock_components.planning.traffic import sent_bytes
from penstock_pipelines.errors import InputError
from penstock_pipelines.recipe import Recipe
from penstock_trainer.contract.config import JobConfig, Strategy

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp-full", "fsdp-hybrid", "zero1", "zero2", "zero3")
NO_PROGRESS = "no progress at this rate of losses"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be planned, beside the recipe."""

    machines: tuple[str, ...] = ()
    """Each TYPE or TYPE:ACCELERATOR:COUNT; empty: the recipe's."""
    node_counts: tuple[int, ...] = ()
    """Empty: the recipe's."""
    strategies: tuple[Strategy, ...] = STRATEGIES
    location: str = ""
    tokens: float | None = None
    """To train on; None: steps x global batch x sequence length."""
    tokens_per_second: tuple[tuple[str, float], ...] = ()
    """Of one accelerator, measured with this model, by its machine, written as in `machines`; "" is the only machine."""
    prices: Prices | None = None
    price_file: str = "the price file"
    """What it is called where a price is missing."""
    interruptions: Interruptions | None = None
    reserved_gb: float = 2.0
    """Of each accelerator for its driver, NCCL and the allocator's gaps: an allowance, not a measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What an option takes in time and money; None: what it follows from was not given."""

    hours: float | None
    """Wall time, with the time that interruptions cost where they are given."""
    no_hours: str
    """Why hours are not known; empty where they are."""
    price: float | None
    """Of all machines over that time, in the price file's currency: of the nodes and of what the recipe has beside them."""
    no_price: str
    """Why the price is not known; empty where it is."""
    goodput: float | None
    """Share of time that trains, 0 to 1."""
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
    rates: Mapping[str, float]
    """Tokens a second of one accelerator, by the machine's name; what is not there is not known."""

    @property
    def own(self) -> Option | None:
        """That of the recipe's own machines, number of nodes and engine; None where they were not asked for."""
        wanted = (self.recipe.resources.num_nodes, self.recipe.config.engine.strategy)
        own = (each for each in self.options if (each.num_nodes, each.strategy) == wanted)
        return next((each for each in own if _is_own_machine(self.recipe, each)), None)

    def costs(self, option: Option) -> Costs:
        """Of an option of this plan."""
        lost, interval, goodput = self.question.interruptions, None, None
        if lost is not None:
            interval = lost.best_interval_seconds(option.num_nodes)
            goodput = lost.goodput(option.num_nodes, interval)
        no_hours = self._no_hours(option, goodput)
        hours = None
        if not no_hours:
            rate = self.rates[option.machine_name] * option.world_size * (1.0 if goodput is None else goodput)
            hours = self.tokens / rate / HOUR
        no_price = self._no_price(option, hours)
        return Costs(
            hours=hours,
            no_hours=no_hours,
            price=None if no_price or hours is None else self._per_hour(option) * hours,
            no_price=no_price,
            goodput=goodput,
            interval_seconds=interval,
            interruptions=lost.expected(option.num_nodes, hours) if lost and hours is not None else None,
        )

    def _no_hours(self, option: Option, goodput: float | None) -> str:
        if not option.is_feasible:
            return "this combination cannot be"
        if goodput == 0:
            return NO_PROGRESS
        if not self.rates:
            return "not known; give --tokens-per-second of one accelerator, measured with this model"
        name = option.machine_name
        return "" if name in self.rates else f"not known for {name}; give --tokens-per-second {name}=RATE"

    def _no_price(self, option: Option, hours: float | None) -> str:
        question = self.question
        if question.prices is None:
            return "not known; give --prices FILE (docs/prices.md)"
        if not question.location:
            return "not known; a price is of a region: give --location"
        machines = dict.fromkeys(machine for machine, _ in self.machines(option))
        missing = [machine_name(each) for each in machines if self.price_per_hour(each) is None]
        if missing:
            strategy = self.recipe.resources.strategy
            return f"no price of {' and '.join(missing)} in {question.location} ({strategy}) in {question.price_file}"
        return "" if hours is not None else "not known; it follows from hours, which are not known"

    def _per_hour(self, option: Option) -> float:
        """Of all its machines, each of which has a price."""
        return sum((self.price_per_hour(machine) or 0.0) * count for machine, count in self.machines(option))

    def price_per_hour(self, machine: MachineSpec) -> float | None:
        """Of one machine, where and as the recipe has it; None where no price is known."""
        question, strategy = self.question, self.recipe.resources.strategy
        if question.prices is None:
            return None
        return question.prices.per_hour(machine, region=question.location, strategy=strategy)

    def machines(self, option: Option) -> Iterator[tuple[MachineSpec, int]]:
        """What is paid for, each with its number: the nodes, and what the recipe has beside them.

        Reducers are only beside the recipe's own machines, for which they were counted, and beside two of them or more.
        """
        yield option.machine, option.num_nodes
        resources = self.recipe.resources
        server = resources.reduction_server
        if server is not None and option.num_nodes > 1 and _is_own_machine(self.recipe, option):
            yield MachineSpec(machine_type=server.machine_type), server.replica_count
        for others in (resources.parameter_servers, resources.evaluators):
            if others is not None:
                yield machine_spec(others.machine), others.replica_count

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
    """The answer to a question.

    Raises InputError for a model whose shape cannot be learned and for a rate that belongs to no machine or to several,
    MachineError for a machine that does not exist, JobSpecError for less than one node.
    """
    config, resources = recipe.config, recipe.resources
    asked = [_machine(recipe, name) for name in question.machines] or [machine_spec(resources.machine)]
    machines = {machine_name(each): each for each in asked}
    rates = _rates(recipe, question, list(machines))
    shape = model_shape(config, recipe.vocab_size)
    found = options(
        config,
        shape,
        machines=list(machines.values()),
        node_counts=list(dict.fromkeys(question.node_counts)) or [resources.num_nodes],
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
        rates=rates,
    )


def _rates(recipe: Recipe, question: Question, names: Sequence[str]) -> dict[str, float]:
    """By the names of the machines. Raises InputError for a rate that is of no machine among them or of several."""
    rates: dict[str, float] = {}
    for machine, rate in question.tokens_per_second:
        if not machine and len(names) > 1:
            each = " ".join(f"--tokens-per-second {name}=RATE" for name in names)
            raise InputError(
                f"one --tokens-per-second is not the rate of {len(names)} machines; give {each}."
            )
        name = machine_name(_machine(recipe, machine)) if machine else names[0]
        if name not in names:
            raise InputError(
                f"--tokens-per-second is given for {name}, which is not planned; planned: {', '.join(names)}. "
                f"Leave it out, or add --machine {name}."
            )
        if name in rates:
            raise InputError(
                f"--tokens-per-second is given twice for {name}; give one rate for each machine."
            )
        rates[name] = rate
    return rates


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


def _machine(recipe: Recipe, name: str) -> MachineSpec:
    """The recipe's own where its type is named: N1 carries other accelerators too. Raises MachineError."""
    own = recipe.resources.machine
    if isinstance(own, MachineSpec) and own.machine_type == name:
        return machine_spec(own)
    return machine_named(name)


def _is_own_machine(recipe: Recipe, option: Option) -> bool:
    return option.machine_name == machine_name(machine_spec(recipe.resources.machine))


def _told(option: Option) -> Mapping[str, Any]:
    told: dict[str, Any] = {
        "machine_type": option.machine.machine_type,
        "accelerator_type": option.machine.accelerator_type,
        "accelerator_count": option.machine.accelerator_count,
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
