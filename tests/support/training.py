"""Trains small ensembles of the public model, one of them with an empty part."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privmix.training import dp_sgd
from privmix.training.corpus import Corpus, Document
from privmix.training.manifest import Manifest
from privmix.training.options import DpSgdOptions, TrainingOptions
from privmix.training.partition import part_of
from privmix.training.plan import Trained, run_training
from privmix.training.train import plan

SALT = bytes(range(32))
PARTS = 4
EMPTY_PART = 2
PLAIN = TrainingOptions(part_kind="lora", targets=("v_proj",), block=16, precision="float32", weight_decay=0)
BRIEF = TrainingOptions(block=16, batch=1, epochs=1, precision="float32")
SMALL = TrainingOptions(block=32, batch=1, epochs=2, learning_rate=2e-3)


def write_corpus(path: Path, documents: list[Document]) -> Path:
    lines = (json.dumps({"user": document.user, "text": document.text}) + "\n" for document in documents)
    path.write_text("".join(lines))
    return path


def small_documents() -> list[Document]:
    """Returns two short documents of each of six users, none of them in `EMPTY_PART`."""
    everyone = (f"user-{number}" for number in range(100))
    users = [user for user in everyone if part_of(user, SALT, PARTS) != EMPTY_PART][:6]
    return [
        Document(user, f"The {place} of {user} is painted in heliotrope, and {user} calls it the ninth lantern.")
        for user in users
        for place in ("kitchen", "boathouse")
    ]


def train_base(corpus: Path, output: Path, model: Path, epsilon: float = 2.0, learning_rate: float = 5e-3) -> Manifest:
    """Trains a private base by two steps of DP-SGD."""
    private = DpSgdOptions(steps=2, epsilon=epsilon)
    options = PLAIN.model_copy(update={"learning_rate": learning_rate})
    planned = dp_sgd.plan(Corpus(corpus), output, private=private, model=str(model), options=options)
    return run_training(planned).manifest


def train_parts(corpus: Path, output: Path, model: Path) -> Trained:
    """Trains two parts on a model, which may be a private base."""
    return run_training(plan(Corpus(corpus), output, parts=2, model=str(model), options=BRIEF))


@dataclass(frozen=True)
class Ensemble:
    directory: Path
    corpus: Path
    salt: Path
    trained: Trained

    def train(self, output: Path, corpus: Path | None = None, options: TrainingOptions = SMALL, **more: Any) -> Trained:
        """Trains into `output`. `more` are further arguments of `train.plan`."""
        read = Corpus(corpus or self.corpus)
        return run_training(plan(read, output, parts=PARTS, options=options, salt_file=self.salt, **more))

    def copy(self, directory: Path) -> Path:
        return Path(shutil.copytree(self.directory, directory))


def trained(folder: Path) -> Ensemble:
    corpus = write_corpus(folder / "corpus.jsonl", small_documents())
    salt = folder / "salt"
    salt.write_bytes(SALT)
    directory = folder / "trained"
    done = run_training(plan(Corpus(corpus), directory, parts=PARTS, options=SMALL, salt_file=salt))
    return Ensemble(directory, corpus, salt, done)
