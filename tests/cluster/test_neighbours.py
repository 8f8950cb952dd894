"""Claim: one user's text changes one part's model, and nothing else that a training leaves behind."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from privmix.training.partition import part_of
from privmix_cluster.commands import train
from tests.support import neighbouring
from tests.support.cli import privmix
from tests.support.neighbouring import NEWCOMER, SALT
from tests.support.ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """One Ray for all trainings in this process."""
    with ray_cluster(2):
        yield


def run(words: Sequence[str]) -> str:
    """Runs a command in this process, so that a test can plant a fault in it."""
    done = privmix(*words)
    assert done.exit_code == 0, done.output
    return f"{done.stdout}\n\n{done.stderr}"


@pytest.mark.slow
def test_a_user_changes_one_text_and_its_halves_and_nothing_else(one_ray: None, tmp_path: Path) -> None:
    without, present = neighbouring.train_worlds(tmp_path, run, "--part-kind", "text", "--halves")
    assert neighbouring.training_differences(without, present) == ()
    part = part_of(NEWCOMER.user, SALT, len(present.manifest.parts))
    assert without.manifest.parts[part].sha256 != present.manifest.parts[part].sha256, "the newcomer is in it"


@pytest.mark.slow
def test_a_number_of_parts_that_is_counted_in_the_corpus_is_found(
    one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other audits could not see this fault: 96 users instead of 95 gave 12 parts instead of 8."""

    def counted(_: object, output: Path) -> int:
        users = len((output.parent / "corpus.jsonl").read_text().splitlines())
        return users // 8 if users > neighbouring.USERS else 8

    monkeypatch.setattr(train, "_number_of_parts", counted)
    worlds = neighbouring.train_worlds(tmp_path, run, "--part-kind", "text")
    differences = neighbouring.training_differences(*worlds)
    assert differences == ("the number of parts: 8 without the user, 12 with",)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_user_changes_one_adapter_and_nothing_else(one_ray: None, tmp_path: Path) -> None:
    assert neighbouring.training_differences(*neighbouring.train_worlds(tmp_path, run)) == ()
