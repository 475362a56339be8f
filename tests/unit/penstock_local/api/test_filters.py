from __future__ import annotations

import pytest

from penstock_local.api.errors import InvalidArgumentError
from penstock_local.api.filters import parse_filter

JOB = {
    "displayName": "train a",
    "state": "JOB_STATE_FAILED",
    "createTime": "2026-03-01T12:00:00.5Z",
    "severity": "ERROR",
    "startedRunCount": "12",
    "enabled": True,
    "labels": {"run-id": "r1", "team": "nlp", "a.b": "dotted"},
    "jobSpec": {"scheduling": {"timeout": "60s"}},
}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("  \n", True),
        ('display_name="train a"', True),
        ('displayName = "train a"', True),
        ("state=JOB_STATE_FAILED", True),
        ("state!=JOB_STATE_FAILED", False),
        ("missing=x", False),
        ("missing!=x", True),
        ("enabled=true", True),
        # Paths.
        ("labels.team=nlp", True),
        ('labels."run-id"="r1"', True),
        ('labels."run-id"="r2"', False),
        ('labels."a.b"=dotted', True),
        ("labels.run-id=r1", True),
        ("job_spec.scheduling.timeout=60s", True),
        ("job_spec.scheduling.timeout.seconds=60", False),
        # Has.
        ("labels:team", True),
        ("labels:nlp", False),
        ("labels.team:*", True),
        ("labels.other:*", False),
        ("display_name:TRAIN", True),
        # Wildcards.
        ('display_name="train*"', True),
        ('display_name="*b"', False),
        # Order: of numbers, times and severities, not of their letters.
        ("started_run_count>9", True),
        ("started_run_count<=12", True),
        ("started_run_count>x", False),
        ('create_time>="2026-03-01T12:00:00Z"', True),
        ('create_time<"2026-03-01T13:00:00+02:00"', False),
        ('create_time>"2026-03-01"', True),
        ("severity>=WARNING", True),
        ("severity>=CRITICAL", False),
        ("missing>1", False),
        ("started_run_count>-1", True),
        # Joined.
        ("state=JOB_STATE_FAILED AND labels.team=cv", False),
        ("state=JOB_STATE_FAILED labels.team=nlp", True),
        ("labels.team=cv OR labels.team=nlp", True),
        ("NOT labels.team=cv", True),
        ("NOT NOT labels.team=cv", False),
        ("-labels.team=cv", True),
        ("labels.team=nlp -state=JOB_STATE_FAILED", False),
        ('NOT (labels.team=nlp AND display_name="train a")', False),
        ("((labels.team=nlp))", True),
        # OR binds closer than AND: (nlp or x) and (no or failed).
        ("labels.team=nlp OR missing=x AND missing=y", False),
        ("missing=y AND labels.team=nlp OR labels.team=nlp", False),
        ("(missing=y AND labels.team=nlp) OR labels.team=nlp", True),
        # Escapes.
        (r'display_name="train \a"', True),
        (r'display_name="a \"quoted\" one"', False),
    ],
)
def test_a_filter_says_which_resources_match(text: str, matches: bool) -> None:
    assert parse_filter(text)(JOB) is matches


def test_a_quoted_quote_is_a_quote() -> None:
    assert parse_filter(r'name="a \"b\" \\ c"')({"name": r'a "b" \ c'})


@pytest.mark.parametrize(
    "text",
    [
        "state",
        "state=",
        "=x",
        "(state=x",
        "state=x)",
        'state="x',
        "state=x AND",
        "OR state=x",
        "state==x",
        "NOT",
        "()",
    ],
)
def test_what_does_not_parse_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_filter(text)
    assert repr(text) in str(caught.value)
