"""What machines cost, from a file that the user keeps: Penstock itself knows no price and gives none.

    currency = "USD"
    source = "Cloud Billing catalogue, list prices"
    date = 2026-11-21

    [[machines]]
    machine_type = "a2-highgpu-8g"
    region = "us-central1"
    strategy = "SPOT"
    per_hour = ...

docs/prices.md describes the format; `refresh_prices` renews per_hour from Google's billing catalogue.
"""

from __future__ import annotations

import datetime
import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from penstock_components.jobs.messages import ACCELERATOR_TYPES, MachineSpec
from penstock_components.machines.catalogue import MachineError, gpu_machine, implied_accelerator
from penstock_components.machines.names import gpu_names

STRATEGIES = ("STANDARD", "SPOT", "FLEX_START")
"""How machines are had: `scheduling.strategy` of a job; each is billed at a rate of its own."""

_LARGEST = 1e15


class PriceError(ValueError):
    """Prices that cannot be read or renewed: which file, entry and field, and what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sku:
    """A part of a machine's price, as the billing catalogue has it."""

    id: str
    """Such as 0000-1111-2222."""
    units_per_hour: float
    """How much of it one machine uses in an hour, in the SKU's own usage unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePrice:
    """What one machine costs in one region."""

    machine_type: str
    region: str
    per_hour: float
    """Of ONE machine with its accelerators and disk, management fee included, in the file's currency."""
    strategy: str = "STANDARD"
    accelerator_type: str = ""
    """Only where a machine type is had with several, or without, as N1; empty: what it always has, else none."""
    accelerator_count: int = 0
    skus: tuple[Sku, ...] = ()
    """What adds up to per_hour; empty for a price that no script renews."""

    @property
    def accelerators(self) -> tuple[str, int]:
        """Type and count, those that the machine type always has included; ("", 0) for none."""
        return _accelerators(self.machine_type, self.accelerator_type, self.accelerator_count)

    def told(self) -> str:
        """For people: `n1-standard-8 with 1 x NVIDIA_TESLA_T4, us-central1, SPOT`."""
        attached = (
            f" with {self.accelerator_count} x {self.accelerator_type}" if self.accelerator_type else ""
        )
        return f"{self.machine_type}{attached}, {self.region}, {self.strategy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """The prices of a file."""

    currency: str
    """ISO 4217, such as USD."""
    source: str
    """Where the prices are from, for people."""
    date: datetime.date
    """On which they held."""
    machines: tuple[MachinePrice, ...] = ()

    def per_hour(self, machine: MachineSpec, *, region: str, strategy: str = "STANDARD") -> float | None:
        """Of one machine, in `currency`; None where the file has no price for it: there is no nearest price.

        Accelerators count only where the machine type has a choice: a2-highgpu-8g is found with its eight A100 named or
        not, and n1-standard-8 with a T4 is another machine than without. A TPU slice of several hosts is as many machines.
        """
        wanted = _accelerators(machine.machine_type, machine.accelerator_type, machine.accelerator_count)
        for price in self.machines:
            if (price.machine_type, price.region, price.strategy) == (
                machine.machine_type,
                region,
                strategy or "STANDARD",
            ) and price.accelerators == wanted:
                return price.per_hour
        return None


def load_prices(path: Path | str) -> Prices:
    """The prices of a file. Raises PriceError, which names the entry and the field that is wrong."""
    return parse_prices(read_text(path), name=str(path))


def read_text(path: Path | str) -> str:
    """The file as it is, line ends included. Raises PriceError where it is not there or not UTF-8."""
    try:
        return Path(path).read_bytes().decode()
    except FileNotFoundError as exc:
        raise PriceError(
            f"{path}: there is no such file. Write one: docs/prices.md describes the format."
        ) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise PriceError(f"{path}: it cannot be read as UTF-8 text: {exc}.") from exc


def parse_prices(text: str, *, name: str) -> Prices:
    """The prices of a file's text; `name` is what PriceError calls it."""
    try:
        held = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # ValueError too for numbers of thousands of digits
        raise PriceError(f"{name}: it is not TOML: {exc}. docs/prices.md describes the format.") from exc
    table = _Table(held, name, _names(Prices))
    entries = [_machine(each, f"{name}: machines[{index}]") for index, each in table.tables("machines")]
    _require_one_each(entries, name)
    return Prices(
        currency=table.matching("currency", r"[A-Z]{3}", "an ISO 4217 code such as USD"),
        source=table.text("source"),
        date=table.date("date"),
        machines=tuple(entries),
    )


def _machine(held: object, place: str) -> MachinePrice:
    table = _Table(held, place, _names(MachinePrice))
    machine_type = table.text("machine_type")
    table.place = f"{place} ({machine_type})"
    kind, count = _attached(table, machine_type)
    return MachinePrice(
        machine_type=machine_type,
        region=table.matching("region", r"[a-z]+-[a-z]+\d+", "a region such as us-central1, no zone"),
        per_hour=table.number("per_hour", may_be_zero=True),
        strategy=table.one_of("strategy", STRATEGIES, default="STANDARD"),
        skus=_skus(table),
        accelerator_type=kind,
        accelerator_count=count,
    )


def _attached(table: _Table, machine_type: str) -> tuple[str, int]:
    """accelerator_type and accelerator_count of an entry, which has both or neither."""
    if "accelerator_type" not in table.held and "accelerator_count" not in table.held:
        return "", 0
    kind = table.one_of("accelerator_type", [name for name, number in ACCELERATOR_TYPES.items() if number])
    count = table.whole("accelerator_count")
    if machine_type in gpu_names():
        try:
            gpu_machine(machine_type, kind, count)
        except MachineError as exc:
            table.refuse("accelerator_type", str(exc))
    return kind, count


def _skus(table: _Table) -> tuple[Sku, ...]:
    if table.held.get("skus") == []:
        table.refuse("skus", "it is empty. Name the SKUs that make the price, or leave skus out.")
    skus: dict[str, Sku] = {}
    for index, each in table.tables("skus"):
        sku = _Table(each, f"{table.place}: skus[{index}]", _names(Sku))
        named = Sku(id=sku.text("id"), units_per_hour=sku.number("units_per_hour", may_be_zero=False))
        if skus.setdefault(named.id, named) is not named:
            sku.refuse("id", f"{named.id} stands twice. Write it once, with the sum of its units_per_hour.")
    return tuple(skus.values())


def _require_one_each(entries: Iterable[MachinePrice], name: str) -> None:
    first: dict[object, int] = {}
    for index, entry in enumerate(entries):
        same = first.setdefault((entry.machine_type, entry.accelerators, entry.region, entry.strategy), index)
        if same != index:
            raise PriceError(
                f"{name}: machines[{index}]: {entry.told()} has a price in machines[{same}] already. Keep one."
            )


def _accelerators(machine_type: str, accelerator_type: str, accelerator_count: int) -> tuple[str, int]:
    if accelerator_type:
        return accelerator_type, accelerator_count
    return implied_accelerator(machine_type) or ("", 0)


def _names(kind: type[Prices] | type[MachinePrice] | type[Sku]) -> list[str]:
    return [each.name for each in fields(kind)]


class _Table:
    """A TOML table whose keys are those of `known`. What is wrong is told with the table's place and the key."""

    def __init__(self, held: object, place: str, known: Collection[str]) -> None:
        if not isinstance(held, dict):
            raise PriceError(f"{place}: it is {held!r}, no table. It has {', '.join(known)}.")
        self.held: Mapping[str, object] = held
        self.place = place
        for key in held:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                self.refuse(
                    key,
                    "there is no such key. "
                    + (f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}."),
                )

    def refuse(self, key: str, reason: str) -> NoReturn:
        raise PriceError(f"{self.place}: {key}: {reason}")

    def text(self, key: str) -> str:
        value = self._given(key)
        if not isinstance(value, str) or not value.strip():
            self.refuse(key, f"it is {value!r}. Write a text that is not empty.")
        return value

    def matching(self, key: str, pattern: str, told: str) -> str:
        value = self.text(key)
        if re.fullmatch(pattern, value) is None:
            self.refuse(key, f"it is {value!r}. Write {told}.")
        return value

    def one_of(self, key: str, allowed: Collection[str], default: str = "") -> str:
        if default and key not in self.held:
            return default
        value = self.text(key)
        if value not in allowed:
            close = difflib.get_close_matches(value.upper(), allowed, n=1)
            meant = f"Did you mean {close[0]}?" if close else f"There are {', '.join(allowed)}."
            self.refuse(key, f"it is {value!r}. {meant}")
        return value

    def number(self, key: str, *, may_be_zero: bool) -> float:
        value = self._given(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.refuse(key, f"it is {value!r}. Write a number, without quotes.")
        if not (0 <= value <= _LARGEST) or (value == 0 and not may_be_zero):  # no NaN is within
            bound = "of 0 or more" if may_be_zero else "above 0"
            self.refuse(key, f"it is {value!r}. Write a number {bound}, at most {_LARGEST:g}.")
        return float(value)

    def whole(self, key: str) -> int:
        value = self._given(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, f"it is {value!r}. Write a whole number of 1 or more.")
        return value

    def date(self, key: str) -> datetime.date:
        value = self._given(key)
        try:
            found = datetime.date.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            found = None
        if not isinstance(found, datetime.date) or isinstance(found, datetime.datetime):
            self.refuse(key, f"it is {str(value)!r}. Write the day on which the prices held, as 2026-11-21.")
        return found

    def tables(self, key: str) -> list[tuple[int, object]]:
        """The list below `key`, numbered; empty where there is none."""
        value = self.held.get(key, [])
        if not isinstance(value, list):
            self.refuse(key, f"it is {value!r}, no list of tables. docs/prices.md describes the format.")
        return list(enumerate(value))

    def _given(self, key: str) -> object:
        if key not in self.held:
            self.refuse(key, "it is missing. docs/prices.md describes the format.")
        return self.held[key]
