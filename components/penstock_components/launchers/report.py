"""The run on one page: a self-contained HTML document with the loss curve, the scores and where all of it comes from."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from penstock_components.launchers.evaluation import Evaluation, improvement
from penstock_trainer.contract.checkpoint import Manifest
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.contract.events import (
    EvaluationEvent,
    Measurement,
    StepEvent,
    measurements_from_jsonl,
)
from penstock_trainer.contract.export import METRICS_NAME, ExportManifest
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import ObjectNotFoundError, join, storage_for

log = logging.getLogger(__name__)

ACCENT, HELD_OUT, MUTED = "#0b6e99", "#1a7f4b", "#b45309"


def render_report(
    evaluation: Evaluation, export: ExportManifest, dataset: DatasetManifest, *, model_uri: str
) -> str:
    """The page as HTML; nothing in it is loaded from elsewhere, and every value in it is escaped.

    Reads the export's metrics and the checkpoint's manifest; if one is missing the page says so.
    """
    measured = read_measurements(join(model_uri, METRICS_NAME))
    steps = [one for one in measured if isinstance(one, StepEvent)]
    evaluations = [one for one in measured if isinstance(one, EvaluationEvent)]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("penstock_components.launchers", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    environment.filters["share"] = _share
    return environment.get_template("report.html.j2").render(
        evaluation=evaluation,
        export=export,
        dataset=dataset,
        model_uri=model_uri,
        steps=steps,
        # The one thing that is not escaped: matplotlib's own SVG, which escapes the text in it.
        curve=Markup(loss_curve(steps, evaluations, evaluation.unigram.loss)) if steps else None,  # noqa: S704
        unigram_gain=improvement(evaluation.challenger.bits_per_byte, evaluation.unigram.bits_per_byte),
        champion_gain=improvement(
            evaluation.challenger.bits_per_byte,
            evaluation.champion.bits_per_byte if evaluation.champion else None,
        ),
        config=list(_flatten(export.config)),
        versions=_versions(export.checkpoint_uri),
        eval_documents=sum(entry.documents for entry in dataset.evaluation),
    )


def read_measurements(uri: str) -> list[Measurement]:
    """What a metrics.jsonl holds; nothing if there is no such object."""
    try:
        return measurements_from_jsonl(storage_for(uri).read(uri))
    except ObjectNotFoundError:
        log.warning("%s does not exist: the report has no loss curve", uri)
        return []


def loss_curve(
    steps: Sequence[StepEvent], evaluations: Sequence[EvaluationEvent], unigram_loss: float | None
) -> str:
    """Training and held-out loss over steps with the unigram baseline, as an SVG element that fits its container's
    width.
    """
    # Text stays text, in the reader's font; the salt makes the ids in it the same each time.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock", "font.size": 11}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(
            [event.step for event in steps],
            [math.nan if event.loss is None else event.loss for event in steps],  # a gap in the line
            color=ACCENT,
            linewidth=1.8,
            marker="o" if len(steps) < 3 else None,
            label="training loss",
        )
        if evaluations:
            axes.plot(
                [event.step for event in evaluations],
                [event.loss for event in evaluations],
                color=HELD_OUT,
                linewidth=1.2,
                marker="o",
                markersize=4,
                label="held-out loss",
            )
        if unigram_loss is not None:
            axes.axhline(unigram_loss, color=MUTED, linewidth=1.2, linestyle="--", label="unigram baseline")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats per token)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d9dee3", linewidth=0.6)
        axes.legend(frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Without a size of its own it takes its container's width, in the proportions of its viewBox.
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace("<svg", '<svg role="img" aria-label="Loss curve"', 1)


def _versions(checkpoint_uri: str) -> Mapping[str, str]:
    uri = join(checkpoint_uri, "manifest.json")
    try:
        return Manifest.from_json(storage_for(uri).read(uri)).versions
    except (ObjectNotFoundError, ContractError) as exc:
        log.warning("the report names no versions: %s", exc)
        return {}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "not finite"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def _share(gain: float) -> str:
    return "equal" if gain == 0 else f"{abs(gain):.1%} {'better' if gain > 0 else 'worse'}"
