"""The decision about a model."""

import json
import math

import pytest

from penstock_components.launchers import gate
from penstock_components.launchers.evaluation import Evaluation, ModelScore, Unigram
from penstock_components.launchers.verdict import Thresholds, Verdict, decide

CHAMPION_NAME = "projects/p/locations/l/models/m@3"
OPEN = {"min_improvement_over_unigram": 0.0, "max_bits_per_byte": 0.0, "min_improvement_over_champion": 0.0}


def score(bits_per_byte):
    return ModelScore(uri="gs://b/m", bits_per_byte=bits_per_byte, loss=1.0, perplexity=2.7, tokens=10)


def evaluation(challenger, champion=None, unigram=4.0):
    return Evaluation(
        dataset_uri="gs://b/d",
        documents=3,
        bytes=100,
        unigram=Unigram(bits_per_byte=unigram, loss=3.0),
        challenger=score(challenger),
        champion=None if champion is None else score(champion),
        champion_name="" if champion is None else CHAMPION_NAME,
    )


@pytest.mark.parametrize(
    ("challenger", "champion", "thresholds", "register", "promote"),
    [
        # no champion: the floors decide
        (3.0, None, {}, True, True),
        (4.0, None, {}, True, True),
        (4.1, None, {}, False, False),
        (3.0, None, {"min_improvement_over_unigram": 0.25}, True, True),
        (3.1, None, {"min_improvement_over_unigram": 0.25}, False, False),
        (3.0, None, {"max_bits_per_byte": 3.0}, True, True),
        (3.0, None, {"max_bits_per_byte": 2.9}, False, False),
        # a champion: better is not enough unless it is better by more than the share
        (2.9, 3.0, {}, True, True),
        (3.0, 3.0, {}, True, False),
        (3.1, 3.0, {}, True, False),
        (1.5, 3.0, {"min_improvement_over_champion": 0.5}, True, False),
        (1.4, 3.0, {"min_improvement_over_champion": 0.5}, True, True),
        # beating the champion does not make up for a floor
        (2.9, 3.0, {"max_bits_per_byte": 2.0}, False, False),
        # a negative share lets a slightly worse model through
        (3.1, 3.0, {"min_improvement_over_champion": -0.1}, True, True),
        # numbers that are not finite
        (None, None, {}, False, False),
        (math.nan, None, {}, False, False),
        (math.inf, None, {"max_bits_per_byte": 9.0}, False, False),
        (None, 3.0, {}, False, False),
        (3.0, math.nan, {}, True, True),
    ],
)
def test_the_table_of_decisions(challenger, champion, thresholds, register, promote):
    verdict = decide(evaluation(challenger, champion), Thresholds(**{**OPEN, **thresholds}))
    assert (verdict.register, verdict.promote) == (register, promote)


@pytest.mark.parametrize("unigram", [None, math.nan, 0.0])
def test_without_a_baseline_the_floor_is_not_passed(unigram):
    assert not decide(evaluation(3.0, unigram=unigram), Thresholds(**OPEN)).register


def test_the_reasons_carry_the_numbers():
    verdict = decide(
        evaluation(3.0, 2.5),
        Thresholds(**{**OPEN, "min_improvement_over_unigram": 0.3, "max_bits_per_byte": 3.5}),
    )
    assert verdict.reasons == (
        "fails the unigram floor: 3.0000 bits per byte against 4.0000 bits per byte of the unigram baseline, 25.00% below; at least 30.00% below is required.",
        "passes the absolute floor: 3.0000 bits per byte, at most 3.5000 bits per byte is allowed.",
        f"does not beat the champion: 3.0000 bits per byte against 2.5000 bits per byte of the champion {CHAMPION_NAME}, 20.00% above; more than 0.00% below is required.",
    )


def run(bed, told, **thresholds):
    uri = bed.write("evaluation.json", told.to_json())
    return bed.run(
        gate.main,
        {**OPEN, **thresholds},
        inputs={"evaluation": uri},
        outputs=["verdict"],
        returns=["register", "promote"],
    )


def test_a_refused_promotion_is_a_result_and_not_a_failure(bed):
    assert run(bed, evaluation(3.0, 3.0)) == 0
    assert (bed.parameter("register"), bed.parameter("promote")) == ("true", "false")


def test_the_verdict_is_written_and_described(bed):
    assert run(bed, evaluation(2.0, 3.0), max_bits_per_byte=2.5) == 0
    verdict = Verdict.from_json(bed.artifact("verdict").read_bytes())
    assert (verdict.floors_passed, verdict.beats_champion, verdict.champion_name) == (
        True,
        True,
        CHAMPION_NAME,
    )
    metadata = bed.metadata("verdict")
    assert metadata["reasons"] == list(verdict.reasons)
    assert metadata["max_bits_per_byte"] == 2.5
    assert (bed.parameter("register"), bed.parameter("promote")) == ("true", "true")


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"format_version": 9})])
def test_what_is_not_an_evaluation_is_told_by_its_uri(bed, capsys, text):
    uri = bed.write("evaluation.json", text)
    assert (
        bed.run(
            gate.main, OPEN, inputs={"evaluation": uri}, outputs=["verdict"], returns=["register", "promote"]
        )
        == 1
    )
    assert f"ContractFileError: {uri} does not hold the evaluation" in capsys.readouterr().err
