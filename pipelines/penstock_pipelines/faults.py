"""faults.yaml: what is to befall a run's training job on the stand-in, and the order that says so to its control API.

    faults:
      - {do: kill, process: writer, rank: 0, at_step: 30}
      - {do: storage, kind: refuse, status: 503, match: checkpoints/, requests: 20, at_step: 40}

The stand-in knows processes by their command lines alone; which process is which is known here. What else a fault may
say is the stand-in's to judge, before anything is submitted; docs/faults.md has all of it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock_pipelines.errors import InputError, ServiceError

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_COMMANDS = {
    "rank": r"-m penstock_trainer\.rank( |$)",
    "writer": r"-m penstock_trainer\.checkpoints\.writer( |$)",
    "launcher": r"-m penstock_trainer( --|$)",
}
"""How the command line of each process of our trainer is known."""
_ON_PROCESSES = ("kill", "hang", "out-of-memory")
_PROCESSES_OF = {"kill": tuple(_COMMANDS)}
"""What else is done, is done to ranks."""
_DATA_OBJECT = r"\.distcp$"
_MANIFEST = r"/step-\d+/manifest\.json$"


@dataclass(frozen=True, slots=True)
class OrderedFault:
    """One entry of the file."""

    told: Mapping[str, Any]
    """As the user wrote it."""
    order: Mapping[str, Any]
    """As the control API takes it."""

    @property
    def kind(self) -> str:
        """What is done, with the process or the kind: "kill writer", "storage refuse"."""
        detail = self.told.get("process") or self.told.get("kind") or self.told.get("how")
        return f"{self.told['do']} {detail}" if detail else str(self.told["do"])

    @property
    def name(self) -> str:
        """For a row of a table."""
        told = self.told
        whom = {"rank": "{rank}", "writer": "of rank {rank}", "launcher": "of {replica}"}
        if "process" in told:
            return f"{self.kind} {whom[told['process']].format(**told)}"
        more = [str(told[name]) for name in ("replica", "status", "only", "match") if name in told]
        more += [f"{told['notice_seconds']:g} s notice"] if told.get("notice_seconds") else []
        return " ".join([self.kind, *more])

    @property
    def is_permanent(self) -> bool:
        """Whether the job has to end with it: nothing that is started again would fare better."""
        return self.kind in ("storage read-only", "out-of-memory rank")


def read_faults(path: Path) -> tuple[OrderedFault, ...]:
    """The entries of a file. Raises InputError, which names the field, what it is and what it may be."""
    try:
        told = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc.strerror}.") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{path} is not YAML: {exc}") from exc
    if not isinstance(told, dict) or set(told) != {"faults"} or not isinstance(told["faults"], list):
        raise InputError(
            f"{path} must have one field, `faults`, with a list; it has {_fields_of(told)}. As in:\n"
            "faults:\n  - {do: kill, process: rank, rank: 1, at_step: 30}"
        )
    if not told["faults"]:
        raise InputError(f"{path}: faults is empty; give at least one, or run without --faults.")
    return tuple(_ordered(f"{path}: faults[{index}]", fault) for index, fault in enumerate(told["faults"]))


def _ordered(at: str, told: Any) -> OrderedFault:
    if not isinstance(told, dict) or not isinstance(told.get("do"), str):
        raise InputError(
            f"{at} is {told!r}; it must be fields of which `do` says what is done, as in {{do: kill, ...}}."
        )
    order = dict(told)
    if told["do"] in _ON_PROCESSES:
        order |= _process(at, order)
    elif told["do"] == "damage" and "match" not in told:
        order |= {"match": _DATA_OBJECT, "beside": _MANIFEST}
    try:
        json.dumps(order, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise InputError(f"{at} has a value that is neither text nor number nor true: {exc}.") from exc
    return OrderedFault(told, order)


def _process(at: str, order: dict[str, Any]) -> dict[str, Any]:
    """`process` and `rank` as the stand-in can find them; both are taken out of the order."""
    process, rank = order.pop("process", None), order.pop("rank", None)
    allowed = _PROCESSES_OF.get(order["do"], ("rank",))
    if process not in allowed:
        nearest = difflib.get_close_matches(str(process), allowed, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise InputError(
            f"{at}.process is {process!r}; {order['do']} takes {' or '.join(allowed)} there.{hint}"
        )
    if process == "launcher":
        if rank is not None:
            raise InputError(f"{at}.rank is {rank!r}; a launcher has none. Name its replica instead.")
        if "replica" not in order:
            raise InputError(f"{at}.replica is missing; each replica has a launcher, as workerpool1-0 has.")
        return {"command": _COMMANDS[process]}
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise InputError(f"{at}.rank is {rank!r}; it must be a rank of the job, from 0 on.")
    return {"command": _COMMANDS[process], "environment": {"RANK": str(rank)}}


def _fields_of(told: Any) -> str:
    return ", ".join(map(str, told)) or "none" if isinstance(told, dict) else f"no fields but {told!r}"


class FaultControl:
    """Orders at the stand-in whose environment this process has."""

    def __init__(self, url: str) -> None:
        """`url` of its control API, such as http://127.0.0.1:8080/penstock."""
        import google.auth
        from google.auth.transport.requests import AuthorizedSession

        credentials, _ = google.auth.default(scopes=[_SCOPE])
        self._session = AuthorizedSession(credentials)
        self._url = f"{url}/faults"

    def arm(self, faults: tuple[OrderedFault, ...], *, labels: Mapping[str, str], source: Path) -> None:
        """Order faults for the next job with these labels. Raises InputError for what the stand-in does not take."""
        body = {"labels": dict(labels), "faults": [dict(fault.order) for fault in faults]}
        answer = self._session.post(self._url, json=body)
        if answer.status_code == 400:
            raise InputError(f"{source}: {answer.json()['error']['message']}")
        if answer.status_code != 200:
            raise ServiceError(f"the stand-in does not take faults: {answer.status_code} {answer.text[:300]}")

    def states(self, labels: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """What became of the faults of the order with these labels, in their order."""
        answer = self._session.get(self._url)
        if answer.status_code != 200:
            raise ServiceError(
                f"the stand-in does not tell of faults: {answer.status_code} {answer.text[:300]}"
            )
        found = [order["faults"] for order in answer.json()["orders"] if order["labels"] == dict(labels)]
        return list(found[-1]) if found else []
