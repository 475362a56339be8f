"""Two launchers whose CLUSTER_SPEC is told in other ways than the stand-in tells it, up to a real all_reduce."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock_trainer.testing import ChildProcess, cluster_environs

TIMEOUT_SECONDS = 90.0


@dataclass(frozen=True)
class Variant:
    """How a CLUSTER_SPEC differs from the one of `cluster_environs`."""

    pools: tuple[str, ...]
    """In the order in which they are named; one that is not a trainer's gets hosts where nobody listens."""
    more: Mapping[str, Any] = field(default_factory=dict)
    trial: Mapping[str, str] = field(default_factory=dict)

    def of(self, text: str) -> str:
        """The variant of a node's CLUSTER_SPEC."""
        told = json.loads(text)
        known = told["cluster"]
        prefix = known["workerpool0"][0].rpartition(".")[0]
        told["cluster"] = {
            pool: known.get(pool, [f"{prefix}.{9 + int(pool[-1])}:2222"]) for pool in self.pools
        }
        told["task"].update(self.trial)
        return json.dumps({**told, **self.more})


VARIANTS = {
    "evaluators and reducers first, job as object, empty trial": Variant(
        ("workerpool3", "workerpool2", "workerpool1", "workerpool0"),
        {"job": {"worker_pool_specs": [{"replica_count": 1}, {"replica_count": 1}]}},
        {"trial": ""},
    ),
    "reducers between the trainers, job as text": Variant(
        ("workerpool1", "workerpool2", "workerpool0"),
        {"job": '{"python_module":"","package_uris":[],"job_args":["--steps=3"]}'},
    ),
    "an evaluator and no reducers, no job, a trial": Variant(
        ("workerpool0", "workerpool3", "workerpool1"), trial={"trial": "7"}
    ),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_two_nodes_meet_in_the_right_ranks(tmp_path: Path, variant: Variant) -> None:
    command = [
        *(sys.executable, "-m", "distributed.quick_launch"),
        *(f"--checkpoint.uri={(tmp_path / 'checkpoints').as_uri()}", "--processes_per_node=2"),
    ]
    with ExitStack() as stack:
        nodes = []
        for environ in cluster_environs(2):
            told = {"CLUSTER_SPEC": variant.of(environ["CLUSTER_SPEC"]), "LAUNCH_RANKS": "reduce"}
            nodes.append(stack.enter_context(ChildProcess(command, {**environ, **told})))
        assert [node.wait(TIMEOUT_SECONDS) for node in nodes] == [0, 0], nodes[0].stderr + nodes[1].stderr
        for number, node in enumerate(nodes):
            seen = [json.loads(text) for text in re.findall(r"seen (\{.*\})", node.stdout)]
            told_by_rank = {rank["RANK"]: (rank["WORLD_SIZE"], rank["LOCAL_RANK"]) for rank in seen}
            assert told_by_rank == {str(2 * number): ("4", "0"), str(2 * number + 1): ("4", "1")}
            assert {(rank["GROUP_RANK"], rank["sum"]) for rank in seen} == {(str(number), 10.0)}
