"""Claim: a template expands to its items, and an invalid template or row is refused with its line and field."""

from pathlib import Path

import pytest

from privmix.foundation.errors import InputError
from privmix.generation.template import Fields, items, read_rows


def test_rows_become_items_with_their_counts() -> None:
    made = items("{{{label}}}: {n}", [{"label": "urgent", "n": 1, "count": 2}, {"label": "routine", "n": 2.5}])
    assert [(item.index, item.prompt) for item in made] == [
        (0, "{urgent}: 1"),
        (1, "{urgent}: 1"),
        (2, "{routine}: 2.5"),
    ]
    assert made[0].fields == {"label": "urgent", "n": 1}


@pytest.mark.parametrize(
    ("template", "row", "problem"),
    [
        ("{topic}", {"label": "x"}, "template: line 1 of the prompts has no field 'topic'; it has label"),
        ("{label.__class__}", {"label": "x"}, "not a field name"),
        ("{label!r}", {"label": "x"}, "not a field name"),
        ("{0}", {"label": "x"}, "not a field name"),
        ("{label", {"label": "x"}, "^template: "),
        ("{label}", {"label": ""}, "the prompt of line 1 is empty"),
        ("{label}", {"label": "x", "count": 0}, "line 1: count"),
        ("{label}", {"label": "x", "count": True}, "line 1: count"),
        ("{label}", {"label": "x", "text": "y"}, "line 1: text: the output has a field of this name"),
    ],
)
def test_a_wrong_template_or_row_is_named(template: str, row: Fields, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        items(template, [row])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"a": 1}\nheliotrope', "line 2: is not JSON"),
        ("[1]", "line 1: must be an object"),
        ('{"a": null}', "line 1: a: must be text"),
    ],
)
def test_a_wrong_file_of_prompts_names_the_line(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=problem) as refused:
        read_rows(path)
    assert "heliotrope" not in str(refused.value)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="there are none"):
        items("x", [])
