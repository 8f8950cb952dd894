"""Claim: the figure of the front page is drawn from the record of private bases."""

import re

from tests.benchmarks import cost


def test_the_figure_is_what_was_measured() -> None:
    """If this fails, run `python -m tests.benchmarks.cost`."""
    stored, drawn = cost.FIGURE.read_text(), cost.draw().decode()
    for pattern in (r"<dc:description>(.*)</dc:description>", r"<text [^>]*>([^<]*)</text>"):
        assert re.findall(pattern, stored) == re.findall(pattern, drawn) != []
