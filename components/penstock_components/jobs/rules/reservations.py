"""Reservations: which a machine takes, told whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock_components.jobs.findings import Finding, quoted
from penstock_components.jobs.messages import CustomJobSpec, MachineSpec, ReservationAffinity
from penstock_components.jobs.rules.contents import filled_pools, is_placeholder, on_persistent_resource
from penstock_components.jobs.rules.context import Context

RESERVATION_KEY = "compute.googleapis.com/reservation-name"
_RESERVATION = re.compile(r"projects/[^/]+/zones/[^/]+/reservations/[^/]+")


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Each pool's reservation affinity: type, key and values."""
    for _, path, pool in filled_pools(spec):
        affinity = (pool.machine_spec or MachineSpec()).reservation_affinity
        if affinity is not None:
            is_held = on_persistent_resource(spec) and context.knows("persistent_resource_id")
            yield from _affinity(f"{path}.machine_spec.reservation_affinity", affinity, is_held=is_held)


def _affinity(path: str, affinity: ReservationAffinity, *, is_held: bool) -> Iterator[Finding]:
    if is_held and affinity.reservation_affinity_type != "NO_RESERVATION":
        yield Finding(
            path=path,
            rule="reservation-persistent-resource",
            reason="a persistent resource holds its machines already; a reservation does not go with it.",
            fix="Remove reservation_affinity, or persistent_resource_id.",
        )
    elif not affinity.reservation_affinity_type:
        meant = "SPECIFIC_RESERVATION" if affinity.values else "ANY_RESERVATION or NO_RESERVATION"
        yield Finding(
            path=f"{path}.reservation_affinity_type",
            rule="required",
            reason="it is missing.",
            fix=f"Write {meant}.",
        )
    elif affinity.reservation_affinity_type != "SPECIFIC_RESERVATION":
        if affinity.key or affinity.values:
            yield Finding(
                path=path,
                rule="reservation-named",
                reason=f"{affinity.reservation_affinity_type} names no reservation, but key or values are given.",
                fix="Write SPECIFIC_RESERVATION, or remove key and values.",
            )
    else:
        yield from _specific_reservation(path, affinity)


def _specific_reservation(path: str, affinity: ReservationAffinity) -> Iterator[Finding]:
    if affinity.key != RESERVATION_KEY and not is_placeholder(affinity.key):
        yield Finding(
            path=f"{path}.key",
            rule="reservation-key",
            reason=f"it is {quoted(affinity.key)}." if affinity.key else "it is missing.",
            fix=f"Write {RESERVATION_KEY}.",
        )
    form = "projects/<project>/zones/<zone>/reservations/<name>"
    if not affinity.values:
        yield Finding(
            path=f"{path}.values", rule="reservation-values", reason="there is none.", fix=f"Write [{form}]."
        )
    for index, value in enumerate(affinity.values):
        if not _RESERVATION.fullmatch(value) and not is_placeholder(value):
            yield Finding(
                path=f"{path}.values[{index}]",
                rule="reservation-values",
                reason=f"{quoted(value)} is not the full name of a reservation.",
                fix=f"Write {form}.",
            )
