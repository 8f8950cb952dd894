"""A private corpus and a public model to an ensemble of adapters.

    train(Corpus(Path("train.jsonl")), Path("ensemble"), parts=8)

One adapter is trained for each part and, with `halves`, for each half of a part (`directory` says where they go).
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
from services.training.manifest import Adapter, Manifest, Part
from services.training.marks import Marks
from services.training.options import Resources, TrainingOptions
from services.training.packing import Tokens, size_bucket, tokenize
from services.training.partition import Partition, Share, read_salt, salt_id
from services.training.progress import Display

# A change in what training does with the same input must not find the adapters of the old way.
_TRAINING = 1


@dataclass(frozen=True)
class Trained:
    """What `train` did: how many adapters it trained and kept, and how many lines of the corpus it left out."""

    manifest: Manifest
    trained: int
    kept: int
    skipped: int


@dataclass(frozen=True, eq=False)
class _Plan:
    """One adapter to be."""

    share: Share
    tokens: Tokens
    fingerprint: str

    @property
    def path(self) -> str:
        return adapter_path(self.share.name, self.fingerprint)

    @property
    def seed(self) -> int:
        # The halves of a part start from the same weights, so that where they differ is due to their texts.
        return int.from_bytes(hashlib.sha256(f"privmix part {self.share.part}".encode()).digest()[:7], "big")


def train(
    corpus: Corpus,
    output: Path,
    *,
    parts: int,
    halves: bool = False,
    model: str | None = None,
    options: TrainingOptions | None = None,
    resources: Resources | None = None,
    salt_file: Path | None = None,
    display: Display | None = None,
) -> Trained:
    """Train an ensemble into `output`, or finish one there; adapters whose text has not changed are kept.

    Args:
        parts: how many; users are spread over them by a keyed hash of their ids.
        halves: train two more adapters for each part, on the two halves that the same hash makes of its users; those
            that are there from before are removed otherwise.
        model: see `public_model.resolve`.
        resources: what one adapter holds of the Ray cluster (one is started for this call where none is connected).
        salt_file: the partition's secret, made on first use; None is `output`/partition.salt.

    Raises:
        InputError: something given cannot be used (`CorpusError`, `PublicModelError` and `ManifestError` are such).
        TrainingError: an adapter could not be trained, or another training is writing to `output`.
    """
    options, resources, display = options or TrainingOptions(), resources or Resources(), display or Display()
    if parts < 1:
        raise InputError(f"parts: must be at least 1, not {parts}")
    with only_writer(output), display:
        display.say("preparing the public model")
        base = find_base(model, options.block)
        salt = read_salt(salt_file or output / SALT)
        display.say("reading the corpus")
        marks = Marks(salt)
        plans = _plan(marks.of(corpus), base, Partition(salt, parts, halves), options)
        if not plans:
            raise InputError(f"corpus {corpus.path}: has no documents")
        missing = [plan for plan in plans if finished(output / plan.path, plan.fingerprint) is None]
        _train_missing(missing, output, base, options, resources, display)
        manifest = _manifest(plans, output, base, salt, options)
        marks.save(output)
        manifest.save(output)
        remove_others(output, manifest)
    return Trained(manifest, trained=len(missing), kept=len(plans) - len(missing), skipped=corpus.skipped)


def _plan(documents: Iterable[Document], base: Base, partition: Partition, options: TrainingOptions) -> list[_Plan]:
    from transformers import AutoTokenizer

    streams = tokenize(documents, AutoTokenizer.from_pretrained(base.path), partition)
    if not any(len(tokens) for tokens in streams.values()):
        return []
    return [
        _Plan(share, tokens, _fingerprint(tokens, base, partition.salt, options)) for share, tokens in streams.items()
    ]


def _fingerprint(tokens: Tokens, base: Base, salt: bytes, options: TrainingOptions) -> str:
    # Keyed, because the name of a directory must not let anyone test a guess at the part's text.
    key = hashlib.sha256(b"privmix part fingerprint\0" + salt).digest()
    recipe = [_TRAINING, base.revision, base.tokenizer, options.model_dump(mode="json")]
    digest = hmac.new(key, json.dumps(recipe, sort_keys=True).encode() + b"\0", "sha256")
    digest.update(tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def _train_missing(
    missing: list[_Plan],
    output: Path,
    base: Base,
    options: TrainingOptions,
    resources: Resources,
    display: Display,
) -> None:
    if not missing:
        return
    from services.training import tasks

    display.say(f"training {len(missing)} adapters")
    jobs = {tasks.Job(plan.share.name, plan.tokens, plan.seed): plan for plan in missing}
    with tasks.connected():
        for job, files in tasks.train_adapters(
            list(jobs), tasks.Base(base.name, base.revision), options, resources, display
        ):
            store(output / jobs[job].path, jobs[job].fingerprint, files)


def _manifest(plans: list[_Plan], output: Path, base: Base, salt: bytes, options: TrainingOptions) -> Manifest:
    adapters = {plan.share: _adapter(plan, output) for plan in plans}
    return Manifest(
        ensemble=ensemble_id(output),
        base_model=base.name,
        base_revision=base.revision,
        tokenizer=base.tokenizer,
        salt_id=salt_id(salt),
        rank=options.rank,
        parts=tuple(_part(share.part, adapters) for share in adapters if share.half is None),
    )


def _adapter(plan: _Plan, output: Path) -> Adapter:
    digest = finished(output / plan.path, plan.fingerprint)
    if digest is None:
        raise TrainingError(f"{plan.share.name}: its adapter is gone or damaged; run again to train it")
    return Adapter(name=plan.share.name, path=plan.path, sha256=digest, size_bucket=size_bucket(len(plan.tokens)))


def _part(index: int, adapters: Mapping[Share, Adapter]) -> Part:
    first, second = Share(index, 0), Share(index, 1)
    halves = (adapters[first], adapters[second]) if first in adapters else None
    return Part(index=index, halves=halves, **dict(adapters[Share(index)]))
