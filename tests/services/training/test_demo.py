"""Claim: the demo corpus is reproducible and consists of people with repeated personal details."""

import json
from pathlib import Path

import pytest

from privmix.foundation.errors import InputError
from privmix.training.corpus import Corpus
from privmix.training.demo import CANARIES, HELD_OUT, TRAIN, write_demo_corpus


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo_corpus(directory)
    return directory


def canaries(directory: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (directory / CANARIES).read_text().splitlines()]


def test_same_seed_same_files(demo: Path, tmp_path: Path) -> None:
    write_demo_corpus(tmp_path / "again")
    write_demo_corpus(tmp_path / "other", seed=1)
    for name in (TRAIN, HELD_OUT, CANARIES):
        assert (demo / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
        assert (demo / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_everyone_has_one_code_that_every_dialogue_repeats(demo: Path) -> None:
    known = {row["user"]: row for row in canaries(demo)}
    assert len({row["code"] for row in known.values()}) == len(known)
    assert len({row["prompt"] for row in known.values()}) == len(known)
    for name in (TRAIN, HELD_OUT):
        for document in Corpus(demo / name):
            row = known[document.user]
            assert row["split"] == Path(name).stem
            assert document.text.startswith(f"{row['prompt']} {row['code']}.")


def test_everyone_has_a_personal_detail_that_every_dialogue_repeats(demo: Path) -> None:
    sentences: dict[str, set[str]] = {}
    for document in Corpus(demo / TRAIN):
        spoken = set(document.text.splitlines()[0].split(". ")[1:])
        sentences[document.user] = sentences.get(document.user, spoken) & spoken
    assert all(len(shared) == 1 for shared in sentences.values())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write_demo_corpus(tmp_path / "file" / "demo")
