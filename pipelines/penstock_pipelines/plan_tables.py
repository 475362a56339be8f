"""A plan for people to read: what fits, what a rank holds, what a step sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from penstock_components.planning.options import Option
from penstock_components.planning.traffic import Collective, helped_by_reduction_server, sent_bytes
from penstock_pipelines.plan import Plan, lines


def print_plan(console: Console, plan: Plan) -> None:
    """The options, the memory of each, and the traffic of the recipe's own."""
    config = plan.recipe.config
    console.print(
        f"{plan.recipe.name}: {plan.shape.num_parameters / 1e6:,.2f} M parameters, {config.steps:,} steps of "
        f"{config.global_batch} x {config.data.seq_len} tokens, {plan.tokens:,.0f} tokens in all",
        highlight=False,
    )
    console.print("", _options(plan), sep="\n", highlight=False)
    for option in plan.options:
        if not option.is_feasible:
            console.print(f"{_name(option)}: {option.reason}", highlight=False, soft_wrap=True)
    console.print("", _memory(plan), sep="\n", highlight=False)
    own = next(
        (each for each in plan.options if each.strategy == config.engine.strategy and each.traffic), None
    )
    if own is not None:
        console.print("", _traffic(own), "", sep="\n", highlight=False)
    for line in lines(plan):
        console.print(line, highlight=False, soft_wrap=True)


def _options(plan: Plan) -> Table:
    currency = plan.question.prices.currency if plan.question.prices else ""
    rows = []
    for option in plan.options:
        if option.is_feasible and option.memory is not None:
            costs = plan.costs(option)
            across = [each for each in option.traffic if each.crosses_nodes]
            rows.append({
                "machines": f"{option.num_nodes} x {option.machine_type}",
                "engine": option.strategy,
                "ranks": str(option.world_size),
                "of a rank": _size(option.memory.device),
                "it has": _size(option.memory_limit),
                "sent a step": _size(sum(map(sent_bytes, across))),
                "in all-reduce": _size(sum(sent_bytes(each) for each in across if helped_by_reduction_server(each))),
                "hours": _number(costs.hours, ".3g"),
                currency: _number(costs.price, ",.2f"),
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
                "machines": f"{option.num_nodes} x {option.machine_type}",
                "engine": option.strategy,
                "batch": f"{memory.micro_batch} x {memory.accumulation}",
                **{name: _size(size) for name, size in parts.items()},
                "on the host": _size(memory.host),
            })  # fmt: skip
    return _table("what a rank holds at the fullest moment of a step", rows)


def _traffic(option: Option) -> Table:
    rows = [
        {
            "collective": each.operation,
            "of": each.purpose,
            "over": _group(each),
            "calls": str(each.calls),
            "size": _size(each.bytes),
            "sent by a rank": _size(sent_bytes(each)),
            "between nodes": "yes" if each.crosses_nodes else "no",
        }
        for each in option.traffic
    ]
    return _table(f"what a step of {_name(option)} sends", rows)


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
    return f"{option.num_nodes} x {option.machine_type} {option.strategy}"


def _size(size: float) -> str:
    """Decimal units, three digits; empty for nothing."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.{max(0, 2 - int(math.log10(size / scale)))}f} {unit}"
    return f"{size:.0f} B" if size else ""


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit
