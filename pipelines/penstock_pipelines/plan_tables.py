"""A plan for people to read: what fits, what a rank holds, what a step sends, and what is not known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from penstock_components.jobs.all_reduce import break_even_step_gain, communication_gain, traffic_share
from penstock_components.jobs.messages import ContainerSpec, MachineSpec, WorkerPoolSpec
from penstock_components.jobs.reducer_sizing import POOL_INDEX, Sizing, sizing
from penstock_components.jobs.topology import nodes
from penstock_components.planning.options import Option, machine_name
from penstock_components.planning.traffic import Collective, helped_by_reduction_server, sent_bytes
from penstock_pipelines.plan import NO_PROGRESS, Plan

_MOST_OF_TRAFFIC = 6
"""Options whose collectives are shown; of more only one's."""
_UNMODELLED = {
    "model.num_kv_heads": "the scores of attention are not counted; CUDA has no fused kernel for grouped heads "
    "(model.num_kv_heads) in fp32 or within a window, and keeps them"
}
"""What is not counted because of a field, where its name does not say it."""


def print_plan(console: Console, plan: Plan) -> None:
    """The options, the memory and, where they are few, the traffic of each, and what is to be said besides."""
    config = plan.recipe.config
    console.print(
        f"{plan.recipe.name}: {plan.shape.num_parameters / 1e6:,.2f} M parameters, {config.steps:,} steps of "
        f"{config.global_batch} x {config.data.seq_len} tokens, {plan.tokens:,.0f} tokens in all",
        highlight=False,
    )
    _print(console, _options(plan), _refusals(plan))
    _print(console, _memory(plan), _of_memory(plan))
    _print(console, _traffic(plan), _of_traffic(plan))
    _print(console, None, lines(plan))


def _print(console: Console, table: Table | None, notes: Iterable[str]) -> None:
    """Notes stand below their table; nothing for an empty table without any."""
    told = list(notes)
    if told or (table is not None and table.row_count):
        console.print()
    if table is not None and table.row_count:
        console.print(table, highlight=False)
    for line in told:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines(plan: Plan) -> Iterator[str]:
    """What is said besides the tables: what follows from figures that were given, or which are missing."""
    yield from _reducers(plan)
    yield from _of_costs(plan)
    if plan.question.interruptions is None and plan.recipe.resources.strategy == "SPOT":
        yield "interruptions: not known; no rate is published for Spot. Give --node-mtbf-hours, as you have seen it"


def _options(plan: Plan) -> Table:
    prices = plan.question.prices
    rows = []
    for option in plan.options:
        if option.is_feasible and option.memory is not None:
            costs = plan.costs(option)
            across = [each for each in option.traffic if each.crosses_nodes]
            rows.append({
                "machines": _nodes(option),
                "engine": option.strategy,
                "ranks": str(option.world_size),
                "of a rank": _size(option.memory.device),
                "it has": _size(option.memory_limit),
                "sent a step": _size(sum(map(sent_bytes, across))),
                "in all-reduce": _size(sum(sent_bytes(each) for each in across if helped_by_reduction_server(each))),
                "hours": NO_PROGRESS if costs.goodput == 0 else _number(costs.hours, ".3g"),
                prices.currency if prices else "": "not known" if prices and costs.price is None else _number(costs.price, ",.2f"),
                "goodput": _number(costs.goodput, ".1%"),
                "save every": _number(costs.interval_seconds, ",.0f", " s"),
                "losses": _number(costs.interruptions, ".2g"),
            })  # fmt: skip
    return _table("what fits; sent is between nodes, by one rank", rows)


def _memory(plan: Plan) -> Table:
    """The parts at the fullest moment of a step; of a model whose activations are not known its states."""
    rows = []
    for option in plan.options:
        if option.memory is not None:
            memory = option.memory
            parts = asdict(memory.peak or memory.states.device)
            rows.append({
                "machines": _nodes(option),
                "engine": option.strategy,
                "batch": f"{memory.micro_batch} x {memory.accumulation}",
                **{name: _size(size) for name, size in parts.items()},
                "on the host": _size(memory.host),
                "for a save, there": _size(memory.save_buffer),
            })  # fmt: skip
    return _table("what a rank holds at the fullest moment of a step", rows)


def _feasible(plan: Plan) -> list[Option]:
    return [option for option in plan.options if option.is_feasible]


def _shown(plan: Plan) -> list[Option]:
    """The options whose traffic is shown: all that can be, or of many one, the recipe's own before others."""
    options = _feasible(plan)
    if len(options) <= _MOST_OF_TRAFFIC:
        return options
    return [option for option in options if option == plan.own] or options[:1]


def _traffic(plan: Plan) -> Table:
    rows = [
        {
            "machines": _nodes(option),
            "engine": option.strategy,
            "collective": each.operation,
            "of": each.purpose,
            "over": _group(each),
            "calls": str(each.calls),
            "size": _size(each.bytes),
            "sent by a rank": _size(sent_bytes(each)),
            "between nodes": "yes" if each.crosses_nodes else "no",
        }
        for option in _shown(plan)
        for each in option.traffic
    ]
    return _table("what a step sends", rows)


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Columns that are empty in every row are left out."""
    names = [name for name in (rows[0] if rows else {}) if any(row[name] for row in rows)]
    table = Table(*names, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _group(collective: Collective) -> str:
    size = f"{collective.group_size} ranks"
    return size if collective.group == "world" else f"{collective.group}, {size}"


def _name(option: Option) -> str:
    return f"{_nodes(option)} {option.strategy}"


def _nodes(option: Option) -> str:
    return f"{option.num_nodes} x {option.machine_name}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(size: float) -> str:
    """Decimal units, three digits; empty for nothing."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.{max(0, 2 - int(math.log10(size / scale)))}f} {unit}"
    return f"{size:.0f} B" if size else ""


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def _of_traffic(plan: Plan) -> Iterator[str]:
    shown = _shown(plan)
    for option in shown:
        if not option.traffic:
            yield f"traffic: a step of {_name(option)} sends nothing"
    left_out = len(_feasible(plan)) - len(shown)
    if left_out:
        yield f"traffic: that of {_count(left_out, 'more option')} is in --json"


def _refusals(plan: Plan) -> Iterator[str]:
    """Options that cannot be, those of one reason together."""
    engines: dict[tuple[str, str], list[str]] = {}
    for option in plan.options:
        if not option.is_feasible:
            engines.setdefault((_nodes(option), option.reason), []).append(option.strategy)
    for (machines, reason), names in engines.items():
        yield f"{machines} {', '.join(names)}: {reason}"


def _of_memory(plan: Plan) -> Iterator[str]:
    if plan.shape.decoder is None:
        yield "memory: model states only; what a step needs beside them is known of the built-in decoder alone"
    named = (name for each in plan.options if each.memory for name in each.memory.unmodelled)
    for name in dict.fromkeys(named):
        yield f"memory: {_UNMODELLED.get(name, f'what {name} changes is not counted')}"


def _of_costs(plan: Plan) -> Iterator[str]:
    """Each reason for what is not known, once."""
    options = _feasible(plan)
    costs = [plan.costs(option) for option in options]
    no_hours = (each.no_hours for each in costs if each.no_hours != NO_PROGRESS)
    yield from (f"hours: {reason}" for reason in dict.fromkeys(no_hours) if reason)
    if len({(each.num_nodes, each.strategy) for each in options}) > 1 and plan.rates:
        yield "hours: a machine's rate is taken for each number of nodes and engine, though it was measured with one"
    yield from (f"cost: {reason}" for reason in dict.fromkeys(each.no_price for each in costs) if reason)
    for told in dict.fromkeys(
        _beside(plan, option) for option, cost in zip(options, costs, strict=True) if cost.price is not None
    ):
        if told:
            yield told


def _beside(plan: Plan, option: Option) -> str:
    """Which machines are paid for beside the nodes; empty where there are none."""
    others = [f"{count} x {machine_name(machine)}" for machine, count in list(plan.machines(option))[1:]]
    return f"cost: {_nodes(option)} with {' and '.join(others)} beside them" if others else ""


def _reducers(plan: Plan) -> Iterator[str]:
    """What the recipe's Reduction Server brings to its own option, and from which gain it pays."""
    option, server = plan.own, plan.recipe.resources.reduction_server
    if option is None or server is None or not option.is_feasible:
        return
    reducer = MachineSpec(machine_type=server.machine_type)
    pool = WorkerPoolSpec(machine_spec=reducer, replica_count=server.replica_count)
    training = nodes(option.machine, option.num_nodes).pools(ContainerSpec())
    if len(training) < POOL_INDEX:
        yield f"reducers of {_name(option)}: they need at least 2 nodes"
        return
    sized = sizing((*training, pool))
    if sized is not None:
        for line in _of_reducers(plan, option, sized, reducer):
            yield f"reducers of {_name(option)}: {line}"


def _of_reducers(plan: Plan, option: Option, sized: Sizing, reducer: MachineSpec) -> Iterator[str]:
    yield sized.told
    share = traffic_share(option.strategy)
    if share is not None and sized.gain:
        whole = communication_gain(share.share, sized.gain)
        yield f"{share.reason}; all its communication becomes {whole:.2f}x as fast"
    hours = (
        f"{_count(sized.num_reducers, 'reducer')} beside {_count(sized.num_nodes, 'node')}: "
        f"{_count(sized.num_reducers, 'machine hour')} more for each {sized.num_nodes} that the nodes take"
    )
    node_price, reducer_price = plan.price_per_hour(option.machine), plan.price_per_hour(reducer)
    if not node_price or reducer_price is None:
        yield f"{hours}; what step gain pays for that follows from prices"
        return
    least = break_even_step_gain(
        num_nodes=sized.num_nodes,
        num_reducers=sized.num_reducers,
        node_price=node_price,
        reducer_price=reducer_price,
    )
    yield f"{hours}, which pays for itself when a step becomes more than {least:.2f}x as fast"
