"""Reservations that are told half."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock_components.jobs.messages import ReservationAffinity
from unit.penstock_components.jobs.rules.specs import (
    A100,
    AT,
    GB200,
    RESERVATION,
    findings,
    job,
    pool,
    refused,
)


@pytest.mark.parametrize(
    ("change", "field", "rule", "word"),
    [
        ({"key": ""}, ".key", "reservation-key", "compute.googleapis.com/reservation-name"),
        ({"key": "reservation-name"}, ".key", "reservation-key", "it is 'reservation-name'"),
        ({"values": ()}, ".values", "reservation-values", "projects/<project>/zones"),
        ({"values": ("r",)}, ".values[0]", "reservation-values", "'r' is not the full name"),
        ({"reservation_affinity_type": ""}, ".reservation_affinity_type", "required", "SPECIFIC_RESERVATION"),
        ({"reservation_affinity_type": "ANY_RESERVATION"}, "", "reservation-named", "names no reservation"),
    ],
)
def test_a_reservation_is_told_whole_or_not_at_all(
    change: dict[str, Any], field: str, rule: str, word: str
) -> None:
    spec = job(pool(replace(GB200, reservation_affinity=replace(RESERVATION, **change))))
    refused(spec, f"{AT}.reservation_affinity{field}", rule, word)


def test_any_reservation_needs_no_name() -> None:
    any_of_them = ReservationAffinity(reservation_affinity_type="ANY_RESERVATION")
    assert findings(job(pool(replace(A100, reservation_affinity=any_of_them)))) == []
    for part in ({"key": RESERVATION.key}, {"values": RESERVATION.values}):
        named = replace(any_of_them, **part)
        spec = job(pool(replace(A100, reservation_affinity=named)))
        refused(spec, f"{AT}.reservation_affinity", "reservation-named", "ANY_RESERVATION names no")


def test_a_reservation_does_not_go_with_a_persistent_resource() -> None:
    spec = job(pool(replace(A100, reservation_affinity=RESERVATION)), persistent_resource_id="shared")
    refused(spec, f"{AT}.reservation_affinity", "reservation-persistent-resource", "holds its machines")
