"""The decision about a model: is it registered, and does it become the champion. A pure function, and its record."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_components.launchers.evaluation import Evaluation, improvement
from penstock_trainer.contract.fields import canonical_json, parse_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """What a model must reach."""

    min_improvement_over_unigram: float
    """Share of the unigram baseline's bits per byte by which the model must be below it, or more."""
    max_bits_per_byte: float
    """Most bits per byte allowed; 0: no such floor."""
    min_improvement_over_champion: float
    """Share by which the model must be below the champion, and more: an equal model does not beat it at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict artifact."""

    floors_passed: bool
    beats_champion: bool
    """True too when there is no champion."""
    reasons: tuple[str, ...]
    """One sentence for each comparison that was made."""
    challenger_uri: str
    """The model that this is about."""
    champion_name: str
    """Version that the model was compared with, or empty."""
    thresholds: Thresholds

    @property
    def register(self) -> bool:
        """The model becomes a version in the registry."""
        return self.floors_passed

    @property
    def promote(self) -> bool:
        """The version becomes the champion."""
        return self.floors_passed and self.beats_champion

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        """Raises ContractError."""
        return parse_json(cls, text, "the verdict")


def decide(evaluation: Evaluation, thresholds: Thresholds) -> Verdict:
    """Compare the challenger with the floors, then with the champion. A number that is not finite fails its floor."""
    floors = [_unigram_floor(evaluation, thresholds)]
    if thresholds.max_bits_per_byte > 0:
        floors.append(_absolute_floor(evaluation, thresholds))
    beats, champion_reason = _beats_champion(evaluation, thresholds)
    return Verdict(
        floors_passed=all(passed for passed, _ in floors),
        beats_champion=beats,
        reasons=(*(reason for _, reason in floors), champion_reason),
        challenger_uri=evaluation.challenger.uri,
        champion_name=evaluation.champion_name,
        thresholds=thresholds,
    )


def _unigram_floor(evaluation: Evaluation, thresholds: Thresholds) -> tuple[bool, str]:
    ours, unigram = evaluation.challenger.bits_per_byte, evaluation.unigram.bits_per_byte
    gain, wanted = improvement(ours, unigram), thresholds.min_improvement_over_unigram
    told = f"{_bits(ours)} against {_bits(unigram)} of the unigram baseline"
    if gain is None:
        return False, f"fails the unigram floor: {told} cannot be compared."
    passed = gain >= wanted
    verb = "passes" if passed else "fails"
    return (
        passed,
        f"{verb} the unigram floor: {told}, {_share(gain)}; at least {wanted:.2%} below is required.",
    )


def _absolute_floor(evaluation: Evaluation, thresholds: Thresholds) -> tuple[bool, str]:
    ours, most = evaluation.challenger.bits_per_byte, thresholds.max_bits_per_byte
    passed = ours is not None and math.isfinite(ours) and ours <= most
    return (
        passed,
        f"{'passes' if passed else 'fails'} the absolute floor: {_bits(ours)}, at most {_bits(most)} is allowed.",
    )


def _beats_champion(evaluation: Evaluation, thresholds: Thresholds) -> tuple[bool, str]:
    if evaluation.champion is None:
        return True, "there is no champion to beat."
    ours, theirs = evaluation.challenger.bits_per_byte, evaluation.champion.bits_per_byte
    gain, wanted = improvement(ours, theirs), thresholds.min_improvement_over_champion
    told = f"{_bits(ours)} against {_bits(theirs)} of the champion {evaluation.champion_name}"
    if gain is None:
        beats = ours is not None and math.isfinite(ours)
        verb = "beats" if beats else "does not beat"
        return beats, f"{verb} the champion: {told}, only a finite number counts."
    beats = gain > wanted
    verb = "beats" if beats else "does not beat"
    return beats, f"{verb} the champion: {told}, {_share(gain)}; more than {wanted:.2%} below is required."


def _bits(value: float | None) -> str:
    return f"{value:.4f} bits per byte" if value is not None else "a number that is not finite"


def _share(gain: float) -> str:
    return f"{abs(gain):.2%} {'below' if gain >= 0 else 'above'}"
