"""The price file: what it holds, which machine a price is for, and what is said of a wrong one."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from penstock_components.jobs.messages import MachineSpec
from penstock_components.planning.prices import PriceError, Sku, load_prices, parse_prices

HEAD = """\
currency = "EUR"
source = "a contract"
date = 2026-11-21
"""
A2 = """
[[machines]]
machine_type = "a2-highgpu-8g"
region = "us-central1"
per_hour = 10.5
"""
EIGHT_A100 = MachineSpec(
    machine_type="a2-highgpu-8g", accelerator_type="NVIDIA_TESLA_A100", accelerator_count=8
)


def entry(**changes: str) -> str:
    """An entry of which some lines are others, in TOML; an empty one is left out."""
    lines = {"machine_type": '"n1-standard-8"', "region": '"europe-west4"', "per_hour": "2.0"} | changes
    return "\n[[machines]]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items() if value)


def told(text: str) -> str:
    with pytest.raises(PriceError) as caught:
        parse_prices(text, name="prices.toml")
    return str(caught.value)


def test_a_file_gives_its_prices_with_their_currency_source_and_date(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    skus = '[{ id = "0000-1111-2222", units_per_hour = 12 }, { id = "0000-1111-3333", units_per_hour = 0.5 }]'
    path.write_text(HEAD + A2 + entry(strategy='"SPOT"', skus=skus))
    prices = load_prices(path)
    assert (prices.currency, prices.source) == ("EUR", "a contract")
    assert prices.date == datetime.date(2026, 11, 21)
    assert prices.machines[0].per_hour == 10.5
    assert prices.machines[0].strategy == "STANDARD"
    assert prices.machines[1].skus == (
        Sku(id="0000-1111-2222", units_per_hour=12),
        Sku(id="0000-1111-3333", units_per_hour=0.5),
    )


def test_the_example_of_the_docs_is_a_price_file() -> None:
    page = (Path(__file__).parents[4] / "docs" / "prices.md").read_text()
    prices = parse_prices(page.split("```toml\n")[1].split("```")[0], name="docs/prices.md")
    assert [each.strategy for each in prices.machines] == ["SPOT", "STANDARD"]
    assert prices.per_hour(EIGHT_A100, region="us-central1", strategy="SPOT") == 100


def test_a_file_without_machines_and_with_a_quoted_date_is_a_beginning() -> None:
    prices = parse_prices(HEAD.replace("2026-11-21", '"2026-11-21"'), name="prices.toml")
    assert (prices.date, prices.machines) == (datetime.date(2026, 11, 21), ())


def test_a_price_holds_for_one_machine_region_and_strategy_and_no_other() -> None:
    prices = parse_prices(HEAD + A2, name="prices.toml")
    assert prices.per_hour(EIGHT_A100, region="us-central1") == 10.5
    assert prices.per_hour(EIGHT_A100, region="us-central1", strategy="") == 10.5
    assert prices.per_hour(EIGHT_A100, region="us-central1", strategy="SPOT") is None
    assert prices.per_hour(EIGHT_A100, region="europe-west4") is None
    assert prices.per_hour(MachineSpec(machine_type="a2-highgpu-4g"), region="us-central1") is None


def test_accelerators_that_a_machine_always_has_need_no_naming() -> None:
    named = 'accelerator_type = "NVIDIA_TESLA_A100"\naccelerator_count = 8\n'
    for text in (HEAD + A2, HEAD + A2 + named):
        prices = parse_prices(text, name="prices.toml")
        assert prices.per_hour(EIGHT_A100, region="us-central1") == 10.5
        assert prices.per_hour(MachineSpec(machine_type="a2-highgpu-8g"), region="us-central1") == 10.5
    assert "machines[0] already" in told(HEAD + A2 + A2 + named)


def test_an_n1_machine_is_priced_apart_for_each_set_of_gpus() -> None:
    bare = entry()
    with_t4 = entry(accelerator_type='"NVIDIA_TESLA_T4"', accelerator_count="1", per_hour="3")
    n1 = MachineSpec(machine_type="n1-standard-8")
    one_t4 = MachineSpec(
        machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=1
    )
    two_t4 = MachineSpec(
        machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=2
    )
    both = parse_prices(HEAD + bare + with_t4, name="prices.toml")
    assert [both.per_hour(each, region="europe-west4") for each in (n1, one_t4, two_t4)] == [2, 3, None]
    only_bare = parse_prices(HEAD + bare, name="prices.toml")
    assert only_bare.per_hour(one_t4, region="europe-west4") is None


SKU = '[{ id = "0000-1111-2222", units_per_hour = 1 }]'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD.replace("currency", "curency"), ["prices.toml: curency", "Did you mean currency?"]),
        (HEAD.replace("source", "whence"), ["prices.toml: whence", "currency, source, date, machines"]),
        ("".join(HEAD.splitlines(keepends=True)[1:]), ["prices.toml: currency: it is missing"]),
        (HEAD.replace("a contract", " "), ["prices.toml: source: it is ' '"]),
        (HEAD.replace("EUR", "euro"), ["prices.toml: currency: it is 'euro'", "USD"]),
        (HEAD.replace("2026-11-21", '"last week"'), ["prices.toml: date: it is 'last week'", "2026-11-21"]),
        (HEAD.replace("2026-11-21", "2026-11-21T10:00:00"), ["prices.toml: date"]),
        (HEAD + 'machines = "none"', ["prices.toml: machines: it is 'none'"]),
        (HEAD + "machines = [3]", ["prices.toml: machines[0]: it is 3, no table"]),
        (HEAD + A2 + entry(perhour="3"), ["machines[1]: perhour", "Did you mean per_hour?"]),
        (HEAD + entry(machine_type=""), ["machines[0]: machine_type: it is missing"]),
        (HEAD + entry(region=""), ["machines[0] (n1-standard-8): region: it is missing"]),
        (HEAD + entry(region='"us-central1-a"'), ["machines[0] (n1-standard-8): region", "no zone"]),
        (HEAD + A2 + entry(per_hour=""), ["machines[1] (n1-standard-8): per_hour: it is missing"]),
        (HEAD + entry(per_hour="-1"), ["per_hour: it is -1", "0 or more"]),
        (HEAD + entry(per_hour="nan"), ["per_hour: it is nan"]),
        (HEAD + entry(per_hour="inf"), ["per_hour: it is inf"]),
        (HEAD + entry(per_hour="1" + "0" * 400), ["per_hour: it is 1000", "at most 1e+15"]),
        (HEAD + entry(per_hour="true"), ["per_hour: it is True", "number"]),
        (HEAD + entry(per_hour='"2.0"'), ["per_hour: it is '2.0'", "without quotes"]),
        (HEAD + entry(strategy='"SPOTT"'), ["strategy: it is 'SPOTT'", "Did you mean SPOT?"]),
        (HEAD + entry(strategy='"cheap"'), ["strategy: it is 'cheap'", "STANDARD, SPOT, FLEX_START"]),
        (HEAD + entry(accelerator_count="1"), ["accelerator_type: it is missing"]),
        (HEAD + entry(accelerator_type='"NVIDIA_TESLA_T4"'), ["accelerator_count: it is missing"]),
        (HEAD + entry(accelerator_type='"NVIDIA_TESLAT4"', accelerator_count="1"), ["Did you mean NVIDIA_TESLA_T4?"]),
        (HEAD + entry(accelerator_type='"NVIDIA_TESLA_T4"', accelerator_count="1.5"), ["accelerator_count: it is 1.5"]),
        (HEAD + entry(accelerator_type='"NVIDIA_H100_80GB"', accelerator_count="8"), ["n1-standard-8 does not carry 8 x NVIDIA_H100_80GB"]),
        (HEAD + entry(skus="[]"), ["skus: it is empty"]),
        (HEAD + entry(skus=SKU.replace("units_per_hour", "units")), ["skus[0]: units", "units_per_hour"]),
        (HEAD + entry(skus=SKU.replace("= 1 ", "= 0 ")), ["skus[0]: units_per_hour: it is 0", "above 0"]),
        (HEAD + entry(skus=SKU[:-1] + "," + SKU[1:]), ["skus[1]: id: 0000-1111-2222 stands twice"]),
        (HEAD + entry() + A2 + entry(per_hour="9"), ["machines[2]: n1-standard-8, europe-west4, STANDARD", "machines[0] already"]),
        ("currency: EUR\n", ["prices.toml: it is not TOML", "line 1"]),
        ("a = " + "1" * 5000, ["prices.toml: it is not TOML"]),
        ("a = " + "[" * 100_000, ["prices.toml: it is not TOML"]),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_by_entry_and_field(text: str, words: list[str]) -> None:
    message = told(text)
    assert [word for word in words if word not in message] == [], message


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(PriceError, match=r"none\.toml: there is no such file"):
        load_prices(tmp_path / "none.toml")
    with pytest.raises(PriceError, match="cannot be read as UTF-8"):
        load_prices(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PriceError, match="cannot be read as UTF-8"):
        load_prices(tmp_path / "binary.toml")
