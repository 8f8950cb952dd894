"""Claim: several trainings in one queue give the same adapters as separate trainings."""

from pathlib import Path

import pytest

from privmix.foundation.errors import WorkError
from privmix.foundation.progress import Display
from privmix.training import dp_sgd, train
from privmix.training.corpus import Corpus
from privmix.training.manifest import FILE
from privmix.training.options import DpSgdOptions, Resources, TrainingOptions
from privmix.training.plan import OpenPlan, run_training, run_trainings
from tests.displays import Recorder
from tests.support.training import SALT, small_documents, write_corpus
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.slow

OPTIONS = TrainingOptions(block=8, epochs=1, learning_rate=5e-3, precision="float32")
PLAIN = OPTIONS.model_copy(update={"part_kind": "lora", "targets": ("q_proj", "v_proj")})
PRIVATE = DpSgdOptions(steps=3, epsilon=2, delta=1e-5)


@pytest.fixture
def several(one_ray: str, tmp_path: Path) -> "Several":
    return Several(tmp_path)


class Several:
    """Plans for one corpus and one model."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self._corpus = write_corpus(room / "corpus.jsonl", small_documents())
        self._model = str(write_tiny_model(room / "tiny"))
        self._salt = room / "salt"
        self._salt.write_bytes(SALT)

    def parts(self, name: str, parts: int, options: TrainingOptions = OPTIONS) -> OpenPlan:
        return train.plan(
            Corpus(self._corpus),
            self.room / name,
            parts=parts,
            model=self._model,
            options=options,
            salt_file=self._salt,
        )

    def private(self, name: str) -> OpenPlan:
        corpus, output = Corpus(self._corpus), self.room / name
        return dp_sgd.plan(corpus, output, private=PRIVATE, model=self._model, options=PLAIN, salt_file=self._salt)


def test_queued_trainings_equal_separate_ones(several: Several) -> None:
    recorder = Recorder()
    plans = [several.private("private"), several.parts("one", 1), several.parts("three", 3)]
    private, single, three = run_trainings(plans, Resources(), recorder)
    assert (private.trained, single.trained, three.trained) == (1, 1, 3)
    assert recorder.shown == {"private/part-000", "one/part-000", *(f"three/part-00{index}" for index in range(3))}
    assert any(line.startswith("private/part-000: noise ") for line in recorder.said)
    assert private.manifest.dp_sgd is not None
    alone = run_training(several.parts("alone", 3))
    assert [part.sha256 for part in alone.manifest.parts] == [part.sha256 for part in three.manifest.parts]
    repeated = run_trainings([several.private("private"), several.parts("three", 3)], Resources(), Display())
    assert [(ensemble.trained, ensemble.kept) for ensemble in repeated] == [(0, 1), (0, 3)]


def test_a_failed_training_is_named_and_the_others_can_continue(several: Several) -> None:
    diverging = OPTIONS.model_copy(update={"learning_rate": 1e20})
    with pytest.raises(WorkError, match="bad/part-000: the weights are not finite"):
        run_trainings([several.parts("good", 2), several.parts("bad", 1, diverging)], Resources(), Display())
    assert not any((several.room / name / FILE).exists() for name in ("good", "bad"))
    good = run_training(several.parts("good", 2))
    assert good.trained + good.kept == 2


def test_a_directory_has_one_training_at_a_time(several: Several) -> None:
    with pytest.raises(WorkError, match="another training is writing to it"):
        run_trainings([several.parts("same", 2), several.parts("same", 1)], Resources(), Display())
