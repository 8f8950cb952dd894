"""A private corpus and a public model to one adapter whose training is differentially private.

    train(Corpus(Path("train.jsonl")), Path("ensemble"), private=DpSgdOptions(unit="user", epsilon=8))

What is written is an ensemble of one part, whose manifest says what was promised and at what cost.
"""

import hashlib
import hmac
import json
import math
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.privacy.dp_sgd import DpSgdEvent, noise_multiplier
from services.training.base import Base, find_base
from services.training.corpus import Corpus, Document
from services.training.directory import (
    SALT,
    adapter_path,
    ensemble_id,
    finished,
    only_writer,
    remove_others,
    store,
)
from services.training.errors import InputError, TrainingError
from services.training.manifest import Manifest, Part, PrivateTraining
from services.training.marks import Marks
from services.training.options import DpSgdOptions, TrainingOptions
from services.training.packing import Tokens, contributions, size_bucket
from services.training.partition import Share, read_salt, salt_id
from services.training.progress import Display
from services.training.train import Trained

RECORD = "dp_sgd.json"
"""Beside the adapter's files: the training that made it, which is paid for once however often it is served."""

# A change in what training does with the same input must not find the adapters of the old way.
_TRAINING = 1
_NAME = Share(0).name
_SEED = 0


def train(
    corpus: Corpus,
    output: Path,
    *,
    private: DpSgdOptions | None = None,
    model: str | None = None,
    options: TrainingOptions | None = None,
    salt_file: Path | None = None,
    display: Display | None = None,
) -> Trained:
    """Train one adapter with DP-SGD into `output`, in this process; one that is there from the same input is kept.

    The sampling rate and the number of steps follow from the options and from `private.population`: without one, from
    how many records or users there are, a number that is taken for public then. `options.batch` is not used.

    A training that is killed has released nothing. Another training on the same text costs as much again.

    Raises:
        InputError: something given cannot be used (`CorpusError`, `PublicModelError` and `ManifestError` are such).
        TrainingError: the training failed, or another one is writing to `output`.
    """
    private, options, display = private or DpSgdOptions(), options or TrainingOptions(), display or Display()
    with only_writer(output), display:
        display.say("preparing the public model")
        base = find_base(model, options.block)
        salt = read_salt(salt_file or output / SALT)
        display.say("reading the corpus")
        marks = Marks(salt)
        units = _units(marks.of(corpus), base, private, options)
        if not units:
            raise InputError(f"corpus {corpus.path}: has no documents")
        fingerprint = _fingerprint(units, base, salt, private, options)
        path = adapter_path(_NAME, fingerprint)
        missing = finished(output / path, fingerprint) is None
        if missing:
            store(output / path, fingerprint, _train(units, base, private, options, display))
        manifest = _manifest(output, path, fingerprint, base, salt, options, sum(map(len, units)))
        marks.save(output)
        manifest.save(output)
        remove_others(output, manifest)
    return Trained(manifest, trained=int(missing), kept=int(not missing), skipped=corpus.skipped)


def planned(private: DpSgdOptions, options: TrainingOptions, units: int) -> DpSgdEvent:
    """The training's event for so many records or users, with the noise that keeps to the promise.

    Raises:
        InputError: no noise does.
    """
    rate = min(1.0, private.expected_batch / (private.population or units))
    steps = math.ceil(options.epochs / rate)
    try:
        noise = noise_multiplier(private.epsilon, private.delta, rate, steps)
    except ValueError as error:
        raise InputError(f"epsilon: {error}") from error
    return DpSgdEvent(private.unit, noise, rate, steps, uuid.uuid4().hex)


def _units(documents: Iterable[Document], base: Base, private: DpSgdOptions, options: TrainingOptions) -> list[Tokens]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base.path)
    return contributions(documents, tokenizer, private.unit, private.blocks * options.block)


def _fingerprint(
    units: Sequence[Tokens], base: Base, salt: bytes, private: DpSgdOptions, options: TrainingOptions
) -> str:
    # Keyed, because the name of a directory must not let anyone test a guess at the text.
    key = hashlib.sha256(b"privmix dp-sgd fingerprint\0" + salt).digest()
    chosen = [settings.model_dump(mode="json") for settings in (private, options)]
    recipe = [_TRAINING, base.revision, base.tokenizer, *chosen, [len(unit) for unit in units]]
    digest = hmac.new(key, json.dumps(recipe, sort_keys=True).encode() + b"\0", "sha256")
    for unit in units:
        digest.update(unit.astype("<i4").tobytes())
    return digest.hexdigest()


def _train(
    units: Sequence[Tokens], base: Base, private: DpSgdOptions, options: TrainingOptions, display: Display
) -> dict[str, bytes]:
    from transformers.utils import logging as transformers_logging

    from services.training import per_unit

    transformers_logging.disable_progress_bar()
    display.say("finding the noise")
    event = planned(private, options, len(units))
    display.say(
        f"training with noise {event.noise_multiplier:.3f}, {event.steps} steps at rate {event.sampling_rate:g}"
    )
    files = per_unit.train_adapter(
        base.path,
        base.name,
        units,
        options,
        _SEED,
        lambda done: display.show({_NAME: done}),
        noise_multiplier=event.noise_multiplier,
        sampling_rate=event.sampling_rate,
        steps=event.steps,
        clip=private.clip,
        expected_batch=private.expected_batch,
    )
    chosen = private.model_dump(include={"epsilon", "delta", "clip", "blocks"})
    record = PrivateTraining(**chosen, event=event)
    return {**files, RECORD: record.model_dump_json().encode()}


def _manifest(
    output: Path, path: str, fingerprint: str, base: Base, salt: bytes, options: TrainingOptions, tokens: int
) -> Manifest:
    digest = finished(output / path, fingerprint)
    if digest is None:
        raise TrainingError(f"{_NAME}: its adapter is gone or damaged; run again to train it")
    return Manifest(
        ensemble=ensemble_id(output),
        base_model=base.name,
        base_revision=base.revision,
        tokenizer=base.tokenizer,
        salt_id=salt_id(salt),
        rank=options.rank,
        parts=(Part(index=0, name=_NAME, path=path, sha256=digest, size_bucket=size_bucket(tokens)),),
        dp_sgd=PrivateTraining.model_validate_json((output / path / RECORD).read_bytes()),
    )
