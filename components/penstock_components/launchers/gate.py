"""Decide whether the model is registered and whether it becomes the champion.

    python -m penstock_components.launchers.gate --executor-input '{{$}}'

A model that is refused is a result, not a failure: the exit code is 0.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence

from penstock_components.launchers import executor
from penstock_components.launchers.contracts import read_contract
from penstock_components.launchers.evaluation import Evaluation
from penstock_components.launchers.verdict import Thresholds, decide
from penstock_trainer.storage import storage_for

log = logging.getLogger(__name__)


def gate(task: executor.ExecutorInput) -> None:
    """Read the evaluation and write the verdict."""
    thresholds = task.parameters_as(Thresholds)
    evaluation = read_contract(task.input("evaluation").uri, Evaluation.from_json, what="evaluation")
    verdict = decide(evaluation, thresholds)
    for reason in verdict.reasons:
        log.info("%s", reason)
    log.info(
        "register: %s, promote: %s",
        *("yes" if decision else "no" for decision in (verdict.register, verdict.promote)),
    )
    uri = task.output("verdict").uri
    storage_for(uri).write(uri, verdict.to_json().encode(), content_type="application/json")
    executor.write_outputs(
        task,
        parameters={"register": verdict.register, "promote": verdict.promote},
        metadata={
            "verdict": {
                "floors_passed": verdict.floors_passed,
                "beats_champion": verdict.beats_champion,
                "reasons": list(verdict.reasons),
                **dataclasses.asdict(thresholds),
            }
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the task."""
    return executor.run(gate, argv)


if __name__ == "__main__":
    sys.exit(main())
