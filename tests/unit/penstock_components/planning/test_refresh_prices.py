"""Renewing a price file from the billing catalogue, over HTTP in the API's own shape."""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession

from penstock_components.planning.prices import PriceError, load_prices
from penstock_components.planning.refresh_prices import main, matching, rate, rewritten

GPU, CORE, DISK, FEE = "0000-0000-00A1", "0000-0000-00A2", "0000-0000-00A3", "0000-0000-00B1"
GIB_MONTH = {"usageUnit": "GiBy.mo", "baseUnit": "By.s", "baseUnitConversionFactor": 2.8759101014016e15}

FILE = """\
# What we pay.
currency = "USD"
source = "Cloud Billing catalogue, list prices"  # no contract
date = 2025-01-31

[[machines]]  # the one we use most
machine_type = "a2-highgpu-8g"
region = "us-central1"
strategy = "SPOT"
per_hour = 1_000.0   # renewed
skus = [
    { id = "0000-0000-00A1", units_per_hour = 8 },      # GPUs
    { id = "0000-0000-00A2", units_per_hour = 96 },
    { id = "0000-0000-00A3", units_per_hour = 0.134408602 },  # 100 GiB / 744 h
    { id = "0000-0000-00B1", units_per_hour = 8 },
]

[[machines]]
machine_type = "n1-standard-4"
region = "us-central1"
per_hour = 0.5
"""


def sku(id_: str, description: str, tiers: list[tuple[float, str, int]], **changes: Any) -> dict[str, Any]:
    """As the API tells one; tiers are the usage from which a price holds, its units and its billionths."""
    rates = [
        {"startUsageAmount": start, "unitPrice": {"currencyCode": "USD", "units": units, "nanos": nanos}}
        for start, units, nanos in tiers
    ]
    expression = {
        "usageUnit": "h",
        "displayQuantity": 1,
        "tieredRates": rates,
        "baseUnit": "s",
        "baseUnitConversionFactor": 3600,
    } | changes.pop("expression", {})
    told = {
        "name": f"services/6F81-5844-456A/skus/{id_}",
        "skuId": id_,
        "description": description,
        "category": {"resourceFamily": "Compute", "usageType": "OnDemand"},
        "serviceRegions": ["us-central1", "us-east1"],
        "pricingInfo": [
            {"summary": "", "pricingExpression": expression, "effectiveTime": "2026-11-01T00:00:00Z"}
        ],
        "serviceProviderName": "Google",
    }
    return told | changes


class Catalogue:
    """What the API on loopback holds, two of a kind to a page, and what it was asked."""

    def __init__(self) -> None:
        self.services = {
            "Cloud Storage": "95FF-2EF5-5EA1",
            "Vertex AI": "C7E2-9256-1C43",
            "Compute Engine": "6F81-5844-456A",
        }
        self.skus = {
            "C7E2-9256-1C43": [sku(FEE, "Management fee on A100 GPU", [(0, "0", 440_000_000)], serviceRegions=["global"])],
            "6F81-5844-456A": [
                sku("0000-0000-00FF", "Nvidia Tesla A100 GPU running in Paris", [(0, "9", 0)], serviceRegions=["europe-west9"]),
                sku(CORE, "A2 Instance Core running in Americas", [(0, "0", 31_611_000)]),
                sku(GPU, "Nvidia Tesla A100 GPU running in Americas", [(0, "2", 933_908_000)]),
                sku(DISK, "SSD backed PD Capacity", [(0, "0", 0), (30, "0", 170_000_000)], expression=GIB_MONTH),
                sku("0000-0000-00FE", "A100 GPU without a price", []),
            ],
        }  # fmt: skip
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.status = 200

    def answer(self, target: str) -> tuple[int, object]:
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.asked.append((parts.path, query))
        if self.status != 200:
            error = {"code": self.status, "message": "Cloud Billing API is disabled", "status": "DENIED"}
            return self.status, {"error": error}
        if parts.path == "/v1/services":
            held = [
                {"name": f"services/{id_}", "serviceId": id_, "displayName": name}
                for name, id_ in self.services.items()
            ]
            return 200, _page("services", held, query)
        return 200, _page("skus", self.skus[parts.path.split("/")[3]], query)


def _page(key: str, held: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    start = int(query.get("pageToken", "at=0").removeprefix("at="))
    more = f"at={start + 2}" if start + 2 < len(held) else ""
    return {key: held[start : start + 2], "nextPageToken": more}


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue()


@pytest.fixture
def endpoint(catalogue: Catalogue) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = catalogue.answer(self.path)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(FILE)
    return path


def refresh(path: Path, endpoint: str, *options: str) -> int:
    with AuthorizedSession(AnonymousCredentials()) as session:
        session.trust_env = False  # a proxy of the machine's would not know the loopback
        return main([str(path), "--endpoint", endpoint, *options], session=session)


def today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def test_an_entry_gets_the_sum_of_its_skus_and_all_else_stays(
    path: Path, endpoint: str, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 x 2.933908 + 96 x 0.031611 + 0.134408602 x 0.17 + 8 x 0.44, to a millionth."""
    before = today()
    assert refresh(path, endpoint) == 0
    assert load_prices(path).date in (before, today())
    date = load_prices(path).date.isoformat()
    expected = FILE.replace("1_000.0   #", "30.048769   #").replace("2025-01-31", date)
    assert path.read_text() == expected
    out = capsys.readouterr().out
    assert "machines[0] (a2-highgpu-8g, us-central1, SPOT): per_hour 1000.0 -> 30.048769" in out
    assert f"    8 h x 2.933908  {GPU}  Nvidia Tesla A100 GPU running in Americas" in out
    assert f"    0.134408602 GiBy.mo (744 h) x 0.17  {DISK}" in out
    assert "machines[1] (n1-standard-4, us-central1, STANDARD): names no skus; left as it is" in out
    assert f"date 2025-01-31 -> {date}" in out


def test_all_pages_are_asked_and_prices_in_the_currency_of_the_file(
    path: Path, endpoint: str, catalogue: Catalogue
) -> None:
    refresh(path, endpoint)
    vertex, compute = "/v1/services/C7E2-9256-1C43/skus", "/v1/services/6F81-5844-456A/skus"
    size, money = {"pageSize": "5000"}, {"currencyCode": "USD", "pageSize": "5000"}
    assert catalogue.asked == [
        ("/v1/services", size),
        ("/v1/services", size | {"pageToken": "at=2"}),
        (vertex, money),
        (compute, money),
        (compute, money | {"pageToken": "at=2"}),
    ]


def test_a_second_refresh_changes_nothing(
    path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refresh(path, endpoint)
    once = path.read_bytes()
    capsys.readouterr()
    assert refresh(path, endpoint) == 0
    assert "per_hour 30.048769, unchanged" in capsys.readouterr().out
    assert load_prices(path).machines[0].per_hour == 30.048769
    # A day may have begun in between.
    assert path.read_bytes().splitlines()[4:] == once.splitlines()[4:]


def test_an_entry_with_a_sku_that_is_gone_or_elsewhere_stays_with_the_old_date(
    path: Path, endpoint: str, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = '[{ id = "0000-0000-00FF", units_per_hour = 8 }]'
    gone = '[{ id = "0000-0000-0000", units_per_hour = 8 }]'
    unpriced = '[{ id = "0000-0000-00FE", units_per_hour = 8 }]'
    for number, skus in enumerate((elsewhere, gone, unpriced), start=1):
        entry = f'machine_type = "n1-standard-{2**number}"\nregion = "us-east1"\nper_hour = 7.0\n'
        path.write_text(f"{path.read_text()}\n[[machines]]\n{entry}skus = {skus}\n")
    held = path.read_text()
    assert refresh(path, endpoint) == 1
    assert path.read_text() == held.replace("1_000.0 ", "30.048769 ")
    out, err = capsys.readouterr()
    assert "date 2025-01-31 stays" in out
    assert "machines[2] (n1-standard-2, us-east1, STANDARD): SKU 0000-0000-00FF" in err
    assert "serves europe-west9, not us-east1. Left as it is." in err
    assert "SKU 0000-0000-0000 is not in the catalogue" in err
    assert "SKU 0000-0000-00FE (A100 GPU without a price) has no price." in err


def test_find_lists_skus_of_a_region_and_changes_nothing(
    path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refresh(path, endpoint, "--find", "a100 gpu", "--region", "us-central1") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{FEE}  h          0.44 USD  Management fee on A100 GPU",
        f"{GPU}  h      2.933908 USD  Nvidia Tesla A100 GPU running in Americas",
    ]
    assert path.read_text() == FILE
    assert refresh(path, endpoint, "--find", "B200", "--region", "us-east1") == 1
    assert "no SKU of Vertex AI or Compute Engine in us-east1 has 'B200'" in capsys.readouterr().err


def test_find_needs_a_region_and_a_region_find(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--find", "A100"], ["--region", "us-central1"]):
        with pytest.raises(SystemExit):
            main([str(path), *options])
        assert "--find and --region go together" in capsys.readouterr().err


def test_a_service_that_is_renamed_is_told_and_can_be_named(
    path: Path, endpoint: str, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue.services["Vertex AI Platform"] = catalogue.services.pop("Vertex AI")
    assert refresh(path, endpoint) == 1
    assert "no service 'Vertex AI'. Did you mean Vertex AI Platform?" in capsys.readouterr().err
    named = ["--service", "Vertex AI Platform", "--service", "Compute Engine"]
    assert refresh(path, endpoint, *named) == 0


def test_an_api_that_refuses_or_is_not_there_is_told_and_the_file_stays(
    path: Path, endpoint: str, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue.status = 403
    assert refresh(path, endpoint) == 1
    error = capsys.readouterr().err
    assert "refused with status 403" in error
    assert "Cloud Billing API is disabled" in error
    assert refresh(path, "http://127.0.0.1:1") == 1
    assert "did not answer" in capsys.readouterr().err
    assert path.read_text() == FILE


def test_a_wrong_file_or_one_without_skus_is_told_before_anything_is_asked(
    path: Path, endpoint: str, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(FILE.replace("region", "regoin", 1))
    assert refresh(path, endpoint) == 1
    assert "machines[0]: regoin: there is no such key. Did you mean region?" in capsys.readouterr().err
    path.write_text(FILE.split("[[machines]]")[0])
    assert refresh(path, endpoint) == 1
    assert "no entry names skus" in capsys.readouterr().err
    assert catalogue.asked == []


def test_without_credentials_it_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    assert main([str(path)]) == 1
    assert "there are no application default credentials" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tiers", "price"),
    [
        ([(0, "2", 933_908_000)], "2.933908"),
        ([(0, "0", 0), (30, "0", 170_000_000)], "0.17"),
        ([(20, "10", 0), (100, "5", 0)], "5"),
        ([(100, "5", 0), (0, "0", 0)], "5"),
    ],
    ids=["flat", "free-first-tier", "no-tier-at-0", "not-in-order"],
)
def test_a_steady_user_pays_the_last_tier(tiers: list[tuple[float, str, int]], price: str) -> None:
    assert rate(sku(GPU, "GPU", tiers), "USD").price == Decimal(price)


def test_the_last_price_of_the_timeline_counts_and_its_currency_must_be_the_files() -> None:
    old, new = sku(GPU, "GPU", [(0, "3", 0)]), sku(GPU, "GPU", [(0, "2", 500_000_000)])
    both = old | {"pricingInfo": [*old["pricingInfo"], *new["pricingInfo"]]}
    assert rate(both, "USD").price == Decimal("2.5")
    with pytest.raises(PriceError, match="is priced in USD, the file in EUR"):
        rate(both, "EUR")


def test_fields_at_their_default_may_be_left_out() -> None:
    """proto3's JSON may leave out zeros."""
    free = sku(GPU, "GPU", [(0, "0", 0)])
    free["pricingInfo"][0]["pricingExpression"]["tieredRates"] = [{"unitPrice": {"currencyCode": "USD"}}]
    assert rate(free, "USD").price == 0
    assert matching([free], text="gpu", region="us-east1", currency="USD")[0].sku_id == GPU


NEW = {0: Decimal("3.250000")}
DAY = datetime.date(2026, 11, 21)
PLAIN = """\
currency = "USD"
source = "s"
date = 2025-01-31
[[machines]]
machine_type = "n1-standard-4"
region = "us-central1"
per_hour = 2
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("per_hour = 2", "per_hour = 3.25"),
        ("  'per_hour'=2e0# dear", "  'per_hour'=3.25# dear"),
        ("per_hour\t=\t+2.0\t", "per_hour\t=\t3.25\t"),
        ("# per_hour = 9\nper_hour = 2", "# per_hour = 9\nper_hour = 3.25"),
        ("per_hour = 2\n[[machines.skus]]", "per_hour = 3.25\n[[machines.skus]]"),
    ],
)
def test_a_price_is_edited_in_its_line(old: str, new: str) -> None:
    expected = PLAIN.replace("per_hour = 2", new).replace("2025-01-31", "2026-11-21")
    assert rewritten(PLAIN.replace("per_hour = 2", old), NEW, date=DAY) == expected


@pytest.mark.parametrize(
    "source",
    ["'''\n[[machines]]\nper_hour = 1'''", "'''\ndate = 1'''"],
    ids=["an-entry-within-a-text", "a-date-within-a-text"],
)
def test_a_file_that_would_be_edited_elsewhere_is_refused_with_the_values(source: str) -> None:
    with pytest.raises(PriceError, match=r"by hand machines\[0\]\.per_hour = 3\.25, date = 2026-11-21"):
        rewritten(PLAIN.replace('"s"', source), NEW, date=DAY)


def test_inline_tables_are_refused_and_the_file_stays(
    path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = f'{{ machine_type = "n1-standard-4", region = "us-east1", per_hour = 2.0, skus = [{{ id = "{GPU}", units_per_hour = 1 }}] }}'
    path.write_text(f'currency = "USD"\nsource = "s"\ndate = "2025-01-31"\nmachines = [{entry}]\n')
    held = path.read_text()
    assert refresh(path, endpoint) == 1
    assert (
        "cannot be edited in place. Nothing is changed; write by hand machines[0].per_hour = 2.933908"
        in capsys.readouterr().err
    )
    assert path.read_text() == held


def test_quotes_line_ends_links_and_modes_are_kept(path: Path, endpoint: str, tmp_path: Path) -> None:
    text = FILE.replace("2025-01-31", '"2025-01-31"').replace("\n", "\r\n")
    path.write_bytes(text.encode())
    path.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    assert refresh(link, endpoint) == 0
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    after = path.read_bytes().decode()
    assert after.count("\r\n") == after.count("\n") == text.count("\n")
    assert isinstance(tomllib.loads(after)["date"], str)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.toml", "prices.toml"]
