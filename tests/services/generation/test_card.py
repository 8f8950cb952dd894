"""Claim: a data card says which texts a private base answered, never counts them as the public model's, and names no
directory of the machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from privmix.generation.card import write_card
from privmix.generation.client import Sampling
from privmix.generation.job import GenerationJob, JobRequest

STATEMENT = {"guarantee": "A promise.", "epsilon": 8.0, "delta": 1e-5, "tokens_charged": 4, "tokens_left": 0}


def job_in(directory: Path, *texts: SimpleNamespace) -> GenerationJob:
    return cast(
        GenerationJob,
        SimpleNamespace(
            directory=directory,
            described={"begun": "today"},
            texts=texts,
            tokens=12,
            request=JobRequest("{}", (), Sampling(9)),
        ),
    )


@pytest.mark.parametrize("kind", ["base", "public", "mixed"])
def test_answers_without_the_parts_are_named_by_their_model(kind: str, tmp_path: Path) -> None:
    text = SimpleNamespace(finish_reason="stop", asked=1, answered_by=kind, item=SimpleNamespace(fields={}))
    of_parts = SimpleNamespace(**vars(text) | {"answered_by": None})
    card = write_card(job_in(tmp_path, text, text, of_parts), STATEMENT)
    assert card["texts"]["answered_without_the_parts"] == {kind: 2}
