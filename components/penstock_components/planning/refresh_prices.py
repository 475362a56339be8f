"""Renew a price file from Google's billing catalogue, and look up what a machine's price is made of.

    python -m penstock_components.planning.refresh_prices prices.toml
    python -m penstock_components.planning.refresh_prices prices.toml --find "A100 GPU" --region us-central1

Asks the Cloud Billing Catalog API (cloudbilling.googleapis.com, v1) with application default credentials. The first form
sets per_hour of each entry that names skus, and the file's date; comments and order stay. The second lists SKUs for a
person to compose an entry from: which SKUs make a machine is nowhere told, and never guessed here.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_components.planning.prices import MachinePrice, PriceError, Prices, parse_prices, read_text

if TYPE_CHECKING:
    from requests import Session

ENDPOINT = "https://cloudbilling.googleapis.com"
SERVICES = ("Vertex AI", "Compute Engine")
"""Display names of the services in whose SKUs machines of training jobs are billed."""
_SCOPE = "https://www.googleapis.com/auth/cloud-billing.readonly"
_PAGE_SIZE = 5000
_NANOS = Decimal(10) ** 9
_MILLIONTH = Decimal("0.000001")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What one usage unit of a SKU costs."""

    sku_id: str
    description: str
    regions: frozenset[str]
    unit: str
    """The API's usageUnit, such as h or GiBy.h; of a month also its hours: GiBy.mo (744 h)."""
    price: Decimal
    """In the currency asked for."""

    def serves(self, region: str) -> bool:
        """Whether the SKU is billed in the region; a global one is billed in all."""
        return region in self.regions or "global" in self.regions


@dataclass(slots=True)
class Renewal:
    """What the catalogue says of a price file."""

    per_hour: dict[int, Decimal] = field(default_factory=dict)
    """Prices that changed, by the entry's place in the file, to a millionth."""
    lines: list[str] = field(default_factory=list)
    """What changed, what did not and why, for people."""
    errors: list[str] = field(default_factory=list)
    """Entries that stay as they are although they name SKUs."""


def fetch(
    session: Session, *, currency: str, services: Sequence[str] = SERVICES, endpoint: str = ENDPOINT
) -> Iterator[dict[str, Any]]:
    """The SKUs of the services, as the API tells them, with prices in the currency.

    Raises PriceError when a service is not in the catalogue and when the API refuses or does not answer.
    """
    listed = _pages(session, f"{endpoint}/v1/services", key="services", asked={})
    names = {each["displayName"]: each["name"] for each in listed}
    for service in services:
        if service not in names:
            close = difflib.get_close_matches(service, names, n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise PriceError(
                f"the billing catalogue has no service {service!r}.{hint} Name services with --service."
            )
    for service in services:
        url = f"{endpoint}/v1/{names[service]}/skus"
        yield from _pages(session, url, key="skus", asked={"currencyCode": currency})


def rate(sku: Mapping[str, Any], currency: str) -> Rate:
    """What a SKU costs now, at the margin.

    Of the timeline in `pricingInfo` the last is the current price. Of its tiers the one that starts at the highest usage
    counts: a SKU may begin with usage that is free or dearer (a first tier at 0, or none that starts at 0), which a job
    that keeps machines for hours has passed; what the first units cost is left out. Raises PriceError for a SKU without a
    price or with one in another currency.
    """
    tiers = _tiers(sku)
    if not tiers:
        raise PriceError(f"SKU {sku['skuId']} ({sku['description']}) has no price.")
    money = max(tiers, key=lambda tier: tier.get("startUsageAmount", 0)).get("unitPrice", {})
    if money.get("currencyCode", currency) != currency:
        raise PriceError(f"SKU {sku['skuId']} is priced in {money['currencyCode']}, the file in {currency}.")
    return Rate(
        sku_id=sku["skuId"],
        description=sku["description"],
        regions=frozenset(sku.get("serviceRegions", ())),
        unit=_unit(_expression(sku)),
        price=Decimal(money.get("units", 0)) + Decimal(money.get("nanos", 0)) / _NANOS,
    )


def renewed(prices: Prices, skus: Iterable[Mapping[str, Any]]) -> Renewal:
    """The sums of the entries that name SKUs. An entry of which one SKU is gone or serves another region has none.

    Takes of `skus` no more than it needs to find all that are named.
    """
    held = _named(skus, {sku.id for entry in prices.machines for sku in entry.skus})
    renewal = Renewal()
    for index, entry in enumerate(prices.machines):
        place = f"machines[{index}] ({entry.told()})"
        if not entry.skus:
            renewal.lines.append(f"{place}: names no skus; left as it is")
            continue
        try:
            parts = _parts(entry, held, prices.currency)
        except PriceError as exc:
            renewal.errors.append(f"{place}: {exc} Left as it is.")
            continue
        total = sum((units * each.price for units, each in parts), Decimal(0)).quantize(_MILLIONTH)
        if float(total) == entry.per_hour:
            renewal.lines.append(f"{place}: per_hour {_plain(total)}, unchanged")
            continue
        renewal.per_hour[index] = total
        renewal.lines.append(f"{place}: per_hour {_plain(entry.per_hour)} -> {_plain(total)}")
        renewal.lines += [
            f"    {units.normalize():f} {each.unit} x {_plain(each.price)}  {each.sku_id}  {each.description}"
            for units, each in parts
        ]
    return renewal


def rewritten(
    text: str, per_hour: Mapping[int, Decimal], *, date: datetime.date | None, name: str = "the file"
) -> str:
    """The text with other prices, by the entry's place, and the date, if one is given; all else is as it was.

    It edits the lines `per_hour = ` and `date = `, reads the outcome, and raises PriceError, with the values to write by
    hand, where that is not the same file with these values: an entry written as an inline table has no such line.
    """
    lines = text.split("\n")
    entry = -1
    for number, line in enumerate(lines):
        if _ENTRY.match(line):
            entry += 1
        elif entry in per_hour and (match := _PER_HOUR.match(line)):
            lines[number] = f"{match[1]}{_plain(per_hour[entry])}{line[match.end() :]}"
        elif entry < 0 and date is not None and (match := _DATE.match(line)):
            quote = match[2][0] if match[2][0] in "\"'" else ""
            lines[number] = f"{match[1]}{quote}{date.isoformat()}{quote}{line[match.end() :]}"
    new = "\n".join(lines)
    if not _is_same_but_for(text, new, per_hour, date):
        told = [f"machines[{index}].per_hour = {_plain(value)}" for index, value in per_hour.items()]
        told += [f"date = {date.isoformat()}"] if date is not None else []
        raise PriceError(
            f"{name}: it is not written as lines below [[machines]] and cannot be edited in place. Nothing is changed; "
            f"write by hand {', '.join(told)}."
        )
    return new


def matching(skus: Iterable[Mapping[str, Any]], *, text: str, region: str, currency: str) -> list[Rate]:
    """SKUs billed in the region, at a price, whose description holds the text in any case; by description."""
    named = [sku for sku in skus if text.lower() in sku["description"].lower() and _tiers(sku)]
    rates = [each for each in (rate(sku, currency) for sku in named) if each.serves(region)]
    return sorted(rates, key=lambda each: (each.description, each.sku_id))


def main(argv: Sequence[str] | None = None, *, session: Session | None = None) -> int:
    """Renew the file or list SKUs, and tell. 1 when the API or the file refused, and when an entry had to be left.

    `session` stands in for one with application default credentials.
    """
    given = _arguments(argv)
    try:
        text = read_text(given.file)
        prices = parse_prices(text, name=str(given.file))
        session = session or _authorized()
        skus = fetch(
            session, currency=prices.currency, services=given.service or SERVICES, endpoint=given.endpoint
        )
        if given.find is not None:
            return _find(skus, given, prices.currency)
        return _renew(given.file, text, prices, skus)
    except PriceError as exc:
        sys.stderr.write(f"refresh_prices: {exc}\n")
        return 1


_ENTRY = re.compile(r"""\s*\[\[\s*(machines|"machines"|'machines')\s*\]\]""")
_PER_HOUR = re.compile(r"""(\s*(?:per_hour|"per_hour"|'per_hour')\s*=\s*)([^\s#]+)""")
_DATE = re.compile(r"""(\s*(?:date|"date"|'date')\s*=\s*)([^\s#]+)""")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m penstock_components.planning.refresh_prices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="the prices, in TOML; docs/prices.md describes the format")
    parser.add_argument("--find", metavar="TEXT", help="list SKUs whose description holds it; change nothing")
    parser.add_argument("--region", default="", help="where, with --find")
    parser.add_argument(
        "--service", action="append", help=f"display name, repeatable; default: {', '.join(SERVICES)}"
    )
    parser.add_argument("--endpoint", default=ENDPOINT, help="of the Cloud Billing API")
    given = parser.parse_args(argv)
    if (given.find is not None) != bool(given.region):
        parser.error("--find and --region go together: prices differ by region")
    return given


def _find(skus: Iterable[Mapping[str, Any]], given: argparse.Namespace, currency: str) -> int:
    rates = matching(skus, text=given.find, region=given.region, currency=currency)
    if not rates:
        services = " or ".join(given.service or SERVICES)
        raise PriceError(f"no SKU of {services} in {given.region} has {given.find!r} in its description.")
    width = max(len(each.unit) for each in rates)
    for each in rates:
        price = f"{_plain(each.price):>12} {currency}"
        sys.stdout.write(f"{each.sku_id}  {each.unit:{width}}  {price}  {each.description}\n")
    return 0


def _renew(path: Path, text: str, prices: Prices, skus: Iterable[Mapping[str, Any]]) -> int:
    """The date is the whole file's: it stays as long as an entry has a price of the old date for want of a SKU."""
    if not any(entry.skus for entry in prices.machines):
        raise PriceError(f"{path}: no entry names skus, so there is nothing to renew. Find some with --find.")
    renewal = renewed(prices, skus)
    date = None if renewal.errors else datetime.datetime.now(datetime.UTC).date()
    new = rewritten(text, renewal.per_hour, date=date, name=str(path))
    if new != text:
        _replace(path, new)
    told = f"date {prices.date} stays" if date is None else f"date {prices.date} -> {date}"
    sys.stdout.write("\n".join([*renewal.lines, told, ""]))
    sys.stderr.write("".join(f"refresh_prices: {path}: {error}\n" for error in renewal.errors))
    return 1 if renewal.errors else 0


def _replace(path: Path, text: str) -> None:
    """Write the file in one step, through a link to it and with its mode: an interruption leaves the old one."""
    target = path.resolve()
    new = target.with_name(f".{target.name}.new")
    try:
        new.write_bytes(text.encode())
        shutil.copymode(target, new)
        new.replace(target)
    except OSError as exc:
        raise PriceError(f"{path}: it cannot be written: {exc}.") from exc


def _named(skus: Iterable[Mapping[str, Any]], ids: set[str]) -> dict[str, Mapping[str, Any]]:
    held: dict[str, Mapping[str, Any]] = {}
    for sku in skus:
        if sku["skuId"] in ids:
            held[sku["skuId"]] = sku
            if len(held) == len(ids):
                break
    return held


def _parts(
    entry: MachinePrice, skus: Mapping[str, Mapping[str, Any]], currency: str
) -> list[tuple[Decimal, Rate]]:
    """Units an hour and rate of each SKU of an entry. Raises PriceError for one that does not make its price."""
    parts = []
    for sku in entry.skus:
        if sku.id not in skus:
            raise PriceError(f"SKU {sku.id} is not in the catalogue: renamed or gone. Look with --find.")
        each = rate(skus[sku.id], currency)
        if not each.serves(entry.region):
            raise PriceError(
                f"SKU {sku.id} ({each.description}) serves {', '.join(sorted(each.regions))}, not {entry.region}."
            )
        parts.append((Decimal(repr(sku.units_per_hour)), each))
    return parts


def _expression(sku: Mapping[str, Any]) -> dict[str, Any]:
    """The current one: the timeline is in chronological order."""
    timeline = sku.get("pricingInfo") or [{}]
    expression: dict[str, Any] = timeline[-1].get("pricingExpression", {})
    return expression


def _tiers(sku: Mapping[str, Any]) -> list[dict[str, Any]]:
    tiers: list[dict[str, Any]] = _expression(sku).get("tieredRates", [])
    return tiers


def _unit(expression: Mapping[str, Any]) -> str:
    """baseUnitConversionFactor is byte seconds in a gibibyte month: how many hours the catalogue's month has."""
    unit: str = expression.get("usageUnit", "")
    if unit != "GiBy.mo" or expression.get("baseUnit") != "By.s":
        return unit
    return f"{unit} ({expression['baseUnitConversionFactor'] / 2**30 / 3600:g} h)"


def _plain(value: Decimal | float) -> str:
    """Without an exponent, with one decimal at least: a TOML float."""
    told = f"{Decimal(repr(value)) if isinstance(value, float) else value:f}"
    whole, _, decimals = told.partition(".")
    return f"{whole}.{decimals.rstrip('0') or '0'}"


def _is_same_but_for(old: str, new: str, per_hour: Mapping[int, Decimal], date: datetime.date | None) -> bool:
    expected = tomllib.loads(old)
    for index, value in per_hour.items():
        expected["machines"][index]["per_hour"] = float(value)
    if date is not None:
        expected["date"] = date.isoformat() if isinstance(expected["date"], str) else date
    try:
        return tomllib.loads(new) == expected
    except tomllib.TOMLDecodeError:
        return False


def _authorized() -> Session:
    """A session with application default credentials. Raises PriceError."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from google.auth.transport.requests import AuthorizedSession

    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError as exc:
        raise PriceError(f"there are no application default credentials: {exc}") from exc
    session: Session = AuthorizedSession(credentials)
    return session


def _pages(session: Session, url: str, *, key: str, asked: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What stands below `key` in every page. Raises PriceError for an answer that is not a page."""
    import requests
    from google.auth.exceptions import GoogleAuthError

    token = ""
    while True:
        params = {**asked, "pageSize": str(_PAGE_SIZE), **({"pageToken": token} if token else {})}
        try:
            response = session.get(url, params=params, timeout=60)
            if response.status_code != 200:
                raise PriceError(
                    f"the billing catalogue refused with status {response.status_code}: {response.text[:500]}"
                )
            page = response.json()
        except (requests.RequestException, GoogleAuthError) as exc:
            raise PriceError(f"the billing catalogue did not answer: {exc}") from exc
        yield from page.get(key, ())
        token = page.get("nextPageToken", "")
        if not token:
            return


if __name__ == "__main__":
    sys.exit(main())
