"""Renew what the catalogue takes from Compute Engine: vCPUs, memory, GPU counts, regions.

    python -m penstock_components.machines.refresh --project my-project

Asks compute.machineTypes.aggregatedList with application default credentials (role: compute.viewer), rewrites the rows
that exist and tells what changed. It adds no row: that Compute Engine has a machine type does not say that Vertex AI
trains on it. Such types are told, for a person to look up.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_components.machines.tables import FILE_NAME, render

if TYPE_CHECKING:
    from requests import Session

ENDPOINT = "https://compute.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/compute.readonly"
_PAGE_SIZE = 500
_EMPTY_ZONE = "NO_RESULTS_ON_PAGE"


class RefreshError(RuntimeError):
    """Compute Engine did not answer, or not in full."""


@dataclass(slots=True)
class Offer:
    """A machine type as Compute Engine has it."""

    vcpus: int
    memory_gb: float
    accelerator_type: str
    """In Compute Engine's spelling, such as nvidia-h100-80gb; empty without."""
    accelerator_count: int
    zones: set[str] = field(default_factory=set)

    @property
    def regions(self) -> list[str]:
        """Regions of its zones."""
        return sorted({zone.rpartition("-")[0] for zone in self.zones})


def fetch(session: Session, *, project: str, endpoint: str = ENDPOINT) -> dict[str, Offer]:
    """Every machine type of Compute Engine by its name.

    Raises RefreshError when it refuses, and when it could not ask every zone: regions would vanish from the catalogue.
    """
    offers: dict[str, Offer] = {}
    for page in _pages(session, f"{endpoint}/compute/v1/projects/{project}/aggregated/machineTypes"):
        _require_whole(page)
        for scope, listed in page.get("items", {}).items():
            for told in listed.get("machineTypes", ()):
                offer = offers.setdefault(told["name"], _offer(told))
                offer.zones.add(scope.removeprefix("zones/"))
    return offers


def renewed(
    held: dict[str, Any], offers: dict[str, Offer], *, today: str
) -> tuple[dict[str, Any], list[str]]:
    """The tables with what Compute Engine says of their rows, and a line for everything that changed or is amiss.

    `date` stays: it is the day on which Vertex AI's own pages were read.
    """
    new = copy.deepcopy(held)
    lines = [line for row in new["gpu_machines"] for line in _renew_gpu_row(row, offers)]
    for row in new["tpu_machines"]:
        lines += _renew(row, offers.get(row["machine_type"]), vcpus="vcpus_per_vm", memory="memory_gb_per_vm")
    names = sorted(_names(new))
    regions = {name: offers[name].regions for name in names if name in offers}
    lines += _changed_regions(new["compute_engine_regions"], regions)
    new |= {"compute_engine_date": today, "compute_engine_regions": regions}
    lines += [
        f"{name}: not among Compute Engine's machine types; left as it is"
        for name in names
        if name not in offers
    ]
    return new, [*sorted(dict.fromkeys(lines)), *_lacking(new, offers)]


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, rewrite the file, tell. 1 when Compute Engine did not answer; the file is then as it was."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock_components.machines.refresh", description=__doc__
    )
    parser.add_argument(
        "--project", default="", help="whose view of Compute Engine; default: the credentials'"
    )
    parser.add_argument("--endpoint", default=ENDPOINT, help="of the Compute Engine API")
    parser.add_argument("--file", type=Path, default=Path(__file__).with_name(FILE_NAME), help="to rewrite")
    given = parser.parse_args(argv)
    try:
        session, project = _authorized(given.project)
        offers = fetch(session, project=project, endpoint=given.endpoint)
    except RefreshError as exc:
        sys.stderr.write(f"refresh: {exc}\n")
        return 1
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    new, lines = renewed(json.loads(given.file.read_text()), offers, today=today)
    given.file.write_text(render(new))
    sys.stdout.write("\n".join([*(lines or ["nothing has changed"]), ""]))
    return 0


def _authorized(project: str) -> tuple[Session, str]:
    """A session with application default credentials, and the project. Raises RefreshError."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from google.auth.transport.requests import AuthorizedSession

    try:
        credentials, found = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError as exc:
        raise RefreshError(f"there are no application default credentials: {exc}") from exc
    if not (project or found):
        raise RefreshError("the credentials name no project. Give --project.")
    return AuthorizedSession(credentials), project or str(found)


def _pages(session: Session, url: str) -> Iterator[dict[str, Any]]:
    """Raises RefreshError for an answer that is not a page."""
    import requests
    from google.auth.exceptions import GoogleAuthError

    asked: dict[str, str | int] = {"maxResults": _PAGE_SIZE}
    while True:
        try:
            response = session.get(url, params=asked, timeout=60)
            if response.status_code != 200:
                raise RefreshError(
                    f"Compute Engine refused with status {response.status_code}: {response.text[:500]}"
                )
            page: dict[str, Any] = response.json()
        except (requests.RequestException, GoogleAuthError) as exc:
            raise RefreshError(f"Compute Engine did not answer: {exc}") from exc
        yield page
        if not page.get("nextPageToken"):
            return
        asked["pageToken"] = page["nextPageToken"]


def _require_whole(page: dict[str, Any]) -> None:
    warnings = [
        page.get("warning", {}),
        *(each.get("warning", {}) for each in page.get("items", {}).values()),
    ]
    amiss = [
        warning.get("message", warning["code"])
        for warning in warnings
        if warning.get("code", _EMPTY_ZONE) != _EMPTY_ZONE
    ]
    amiss += [f"{place} could not be reached" for place in page.get("unreachables", ())]
    if amiss:
        raise RefreshError(f"Compute Engine's answer is not whole ({'; '.join(amiss)}). Run it again later.")


def _offer(told: dict[str, Any]) -> Offer:
    accelerators = told.get("accelerators", [])
    return Offer(
        vcpus=told["guestCpus"],
        memory_gb=_number(told["memoryMb"] / 1024),
        accelerator_type=accelerators[0]["guestAcceleratorType"] if accelerators else "",
        accelerator_count=sum(each["guestAcceleratorCount"] for each in accelerators),
    )


def _renew_gpu_row(row: dict[str, Any], offers: dict[str, Offer]) -> Iterator[str]:
    """Rewrite one row, and say what changed. To N1 GPUs are attached: Compute Engine names none with the type."""
    offer = offers.get(row["machine_type"])
    yield from _renew(row, offer, vcpus="vcpus", memory="memory_gb")
    if offer is None or not offer.accelerator_type:
        return
    told = f"{offer.accelerator_count} x {offer.accelerator_type}"
    if offer.accelerator_type != row["accelerator_type"].lower().replace("_", "-"):
        yield (
            f"{row['machine_type']}: Compute Engine has it with {told}, the catalogue with {row['accelerator_type']}; "
            "look it up, nothing is changed"
        )
    elif row["accelerator_counts"] != [offer.accelerator_count]:
        yield f"{row['machine_type']}: accelerator_counts {row['accelerator_counts']} -> [{offer.accelerator_count}]"
        row["accelerator_counts"] = [offer.accelerator_count]


def _renew(row: dict[str, Any], offer: Offer | None, *, vcpus: str, memory: str) -> Iterator[str]:
    if offer is None:
        return
    for name, value in ((vcpus, offer.vcpus), (memory, offer.memory_gb)):
        if row[name] != value:
            yield f"{row['machine_type']}: {name} {row[name]} -> {value}"
            row[name] = value


def _changed_regions(old: dict[str, list[str]], new: dict[str, list[str]]) -> Iterator[str]:
    for name, regions in new.items():
        before, now = set(old.get(name, ())), set(regions)
        told = [f"+{region}" for region in sorted(now - before)] + [
            f"-{region}" for region in sorted(before - now)
        ]
        if told:
            yield f"{name}: regions of Compute Engine {' '.join(told)}"


def _names(held: dict[str, Any]) -> set[str]:
    sized = {f"{series}-{size}" for series, sizes in held["cpu_machines"].items() for size in sizes}
    return sized | {row["machine_type"] for key in ("gpu_machines", "tpu_machines") for row in held[key]}


def _lacking(held: dict[str, Any], offers: dict[str, Offer]) -> Iterable[str]:
    """Machine types with GPUs, of a family that the catalogue has, that it lacks."""
    known = {row["machine_type"] for row in held["gpu_machines"]}
    families = {name.partition("-")[0] for name in known}
    for name, offer in sorted(offers.items()):
        if offer.accelerator_type and name not in known and name.partition("-")[0] in families:
            seen = " (known not to be on Vertex AI's list)" if name in held["only_on_compute_engine"] else ""
            yield (
                f"{name}: Compute Engine has it with {offer.accelerator_count} x {offer.accelerator_type}, the catalogue "
                f"does not{seen}; look whether Vertex AI trains on it"
            )


def _number(value: float) -> float:
    """To a tenth, and whole where it is, as the file has it."""
    rounded = round(value, 1)
    return int(rounded) if rounded.is_integer() else rounded


if __name__ == "__main__":
    sys.exit(main())
