"""JSON and YAML that somebody else wrote: whatever it holds, it is a value of JSON or one error, and soon."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from hypothesis import given, settings, strategies

from penstock_components.jobs.documents import MOST_CHARACTERS, DocumentError, parse


def merges(levels: int, aliases: int = 9) -> str:
    """Mappings that merge the one before several times: `aliases` ** `levels` entries when written out."""
    lines = ["b0: &b0 {k: 1}"]
    for level in range(1, levels + 1):
        several = ", ".join([f"*b{level - 1}"] * aliases)
        lines.append(f"b{level}: &b{level} {{<<: [{several}], k{level}: 1}}")
    return "\n".join(lines)


def aliases(levels: int) -> str:
    lines = ["b0: &b0 [1]"]
    for level in range(1, levels + 1):
        lines.append(f"b{level}: &b{level} [{', '.join([f'*b{level - 1}'] * 9)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        merges(12),
        merges(40, aliases=2),
        aliases(12),
        "a: &a {<<: *a}",
        "a: &a {<<: [*a, *a]}",
        "a: &a [*a]",
        "a: &a {? *a : 1}",
    ],
    ids=["merges", "doubled", "aliases", "merges-itself", "merges-itself-twice", "holds-itself", "own-key"],
)
def test_what_unfolds_without_end_is_refused_before_it_is_unfolded(text: str) -> None:
    started = time.process_time()
    with pytest.raises(DocumentError, match="unfold to more than 1,000,000") as caught:
        parse(text)
    assert caught.value.finding.rule == "unfolds"
    assert time.process_time() - started < 1  # a few milliseconds; written out, it would take hours


def test_merge_keys_and_aliases_of_an_ordinary_file_are_read() -> None:
    text = "base: &base {a: 1, b: 2}\nextra: &extra {c: 3}\nheld:\n  <<: [*base, *extra]\n  b: 4\nsame: *base"
    assert parse(text)["held"] == {"a": 1, "b": 4, "c": 3}
    assert parse(text)["same"] == {"a": 1, "b": 2}
    assert parse(merges(3))["b3"] == {"k": 1, "k1": 1, "k2": 1, "k3": 1}


@pytest.mark.parametrize(
    "text",
    [
        "a: !!bool foo",
        'a: !!int ""',
        "a: !!int foo",
        "a: !!float foo",
        "a: !!timestamp x",
        "a: !!binary x",
        "a: !!set {x}",
        "a: !!omap [x: 1]",
        "a: !!pairs [x: 1]",
        "a: !!map x",
        "a: !!seq x",
        "a: !!str [x]",
        "a: !!python/name:os.system x",
        "a: 0x_",
        "a: 0b_",
        "a: " + "9" * 5000,
        "a: 0x" + "f" * 5000,
        "? [x]\n: 1",
        "a: &a !!str {=: *a}",
        "a: [" * 1500,
        "a: " + "[" * 1500 + "]" * 1500,
        "a:\n" + "- " * 1500 + "x",
        "a: " + "{b: " * 300 + "1" + "}" * 300,
        "a: \ud800",
        "a: @x",
        "- " * 100_000,
    ],
)
def test_yaml_that_cannot_be_read_is_one_error_that_says_where(text: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(text)
    assert caught.value.finding.rule in ("unreadable", "unfolds")
    assert len(caught.value.finding.told()) < 500


def test_a_value_that_is_none_of_its_tag_is_told_with_its_line() -> None:
    with pytest.raises(DocumentError, match=r"'foo' is no bool.*line 2, column 4"):
        parse("a: 1\nb: !!bool foo")
    with pytest.raises(DocumentError, match=r"the number '9{120}'\.\.\. has more than 300 digits"):
        parse("a: " + "9" * 301)


@pytest.mark.parametrize("name", ["job.json", ""])
@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "9" * 5000 + "}",
        "[" * 1500 + "]" * 1500,
        '{"a": ' * 300 + "1" + "}" * 300,
        '{"a": "\\ud800"}',
        '[{"a\\uDC00": 1}]',
        '{"' + "a" * 3_000_000 + '": 1, "' + "a" * 3_000_000 + '": 1}',
    ],
)
def test_json_that_cannot_be_read_is_one_short_error(text: str, name: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(text, name=name)
    assert caught.value.finding.rule == "unreadable"
    assert len(caught.value.finding.told()) < 600


def test_a_character_that_json_writes_as_a_pair_is_read() -> None:
    assert parse('["\\ud83d\\ude00", "\\\\ud800"]') == ["\U0001f600", "\\ud800"]


def test_a_key_that_stands_twice_among_many_is_found_at_once() -> None:
    started = time.process_time()
    keys = ", ".join(f'"k{index}": 1' for index in range(100_000))
    with pytest.raises(DocumentError, match="'k99999' stands twice"):
        parse(f'{{{keys}, "k99999": 1}}', name="many.json")
    assert time.process_time() - started < 2  # every key compared with every other would take minutes


def test_a_long_document_is_refused_unread() -> None:
    with pytest.raises(DocumentError, match="at most 8,388,608"):
        parse("x" * (MOST_CHARACTERS + 1))


@settings(max_examples=200, deadline=None)
@given(strategies.text("ab:[]{}&*<>!?-|, \n\t'\"0x1.e+_~=#%@", max_size=40))
def test_any_text_is_a_value_of_json_or_one_error(text: str) -> None:
    try:
        document = parse(text)
    except DocumentError:
        return
    json.dumps(document, skipkeys=True)


VALUES = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats(allow_nan=False)
    | strategies.text(strategies.characters(codec="ascii"), max_size=5),
    lambda held: strategies.lists(held, max_size=3)
    | strategies.dictionaries(strategies.text("abc", min_size=1, max_size=3), held, max_size=3),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_what_was_written_is_read_as_it_was(value: object) -> None:
    assert parse(json.dumps(value), name="x.json") == value
    assert parse(yaml.safe_dump(value)) == value
