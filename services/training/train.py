"""A private corpus and a public model to an ensemble of adapters.

    train(Corpus(Path("train.jsonl")), Path("ensemble"), parts=8)

One adapter is trained for each part and, with `halves`, for each half of a part (`directory` says where they go).
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.errors import InputError
from services.progress import Display
from services.training.base import Base, find_base
from services.training.corpus import Corpus, Document
from services.training.directory import SALT, ensemble_id, only_writer
from services.training.manifest import Adapter, Manifest, Part
from services.training.marks import Marks
from services.training.options import Resources, TrainingOptions
from services.training.packing import Tokens, size_bucket, tokenize
from services.training.partition import Partition, Share, read_salt, salt_id
from services.training.plan import Planned, Recipe, Trained, Training, carry_out

# A change in what training does with the same input must not find the adapters of the old way.
_TRAINING = 3


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
        WorkError: an adapter could not be trained, or another training is writing to `output`.
    """
    one = plan(corpus, output, parts=parts, halves=halves, model=model, options=options, salt_file=salt_file)
    (trained,) = carry_out([one], resources or Resources(), display or Display())
    return trained


@contextmanager
def plan(
    corpus: Corpus,
    output: Path,
    *,
    parts: int,
    halves: bool = False,
    model: str | None = None,
    options: TrainingOptions | None = None,
    salt_file: Path | None = None,
) -> Iterator[Training]:
    """What `train` would do, for `carry_out` to do together with other trainings; no other may write there meanwhile.

    Raises:
        InputError, WorkError: as `train`.
    """
    options = options or TrainingOptions()
    if parts < 1:
        raise InputError(f"parts: must be at least 1, not {parts}")
    with only_writer(output):
        base = find_base(model, options.block)
        salt = read_salt(salt_file or output / SALT)
        marks = Marks(salt)
        shares = _shares(marks.of(corpus), base, Partition(salt, parts, halves), options)
        if not shares:
            raise InputError(f"corpus {corpus.path}: has no documents")
        yield Training(
            output,
            base,
            [each.planned for each in shares],
            manifest=lambda: _manifest(shares, output, base, salt, options),
            marks=marks,
            skipped=corpus.skipped,
        )


@dataclass(frozen=True, eq=False)
class _Entry:
    """An adapter to be, as the manifest will name it."""

    share: Share
    planned: Planned
    size_bucket: int


def _shares(documents: Iterable[Document], base: Base, partition: Partition, options: TrainingOptions) -> list[_Entry]:
    from transformers import AutoTokenizer

    streams = tokenize(documents, AutoTokenizer.from_pretrained(base.path), partition)
    if not any(len(tokens) for tokens in streams.values()):
        return []
    return [
        _Entry(
            share,
            Planned(
                share.name,
                _fingerprint(tokens, base, partition.salt, options),
                partial(_recipe, share, tokens, options),
            ),
            size_bucket(len(tokens)),
        )
        for share, tokens in streams.items()
    ]


def _recipe(share: Share, tokens: Tokens, options: TrainingOptions) -> Recipe:
    from services.training.adapter import train_adapter

    return Recipe(partial(train_adapter, tokens=tokens, options=options, seed=_seed(share)))


def _seed(share: Share) -> int:
    # The halves of a part start from the same weights, so that where they differ is due to their texts.
    return int.from_bytes(hashlib.sha256(f"privmix part {share.part}".encode()).digest()[:7], "big")


def _fingerprint(tokens: Tokens, base: Base, salt: bytes, options: TrainingOptions) -> str:
    # Keyed, because the name of a directory must not let anyone test a guess at the part's text.
    key = hashlib.sha256(b"privmix part fingerprint\0" + salt).digest()
    recipe = [_TRAINING, base.revision, base.tokenizer, options.model_dump(mode="json")]
    digest = hmac.new(key, json.dumps(recipe, sort_keys=True).encode() + b"\0", "sha256")
    digest.update(tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def _manifest(shares: list[_Entry], output: Path, base: Base, salt: bytes, options: TrainingOptions) -> Manifest:
    adapters = {each.share: _adapter(each, output) for each in shares}
    return Manifest(
        ensemble=ensemble_id(output),
        base_model=base.name,
        base_revision=base.revision,
        tokenizer=base.tokenizer,
        salt_id=salt_id(salt),
        rank=options.rank,
        attention=options.attention,
        parts=tuple(_part(share.part, adapters) for share in adapters if share.half is None),
    )


def _adapter(one: _Entry, output: Path) -> Adapter:
    planned = one.planned
    return Adapter(name=planned.name, path=planned.path, sha256=planned.digest(output), size_bucket=one.size_bucket)


def _part(index: int, adapters: Mapping[Share, Adapter]) -> Part:
    first, second = Share(index, 0), Share(index, 1)
    halves = (adapters[first], adapters[second]) if first in adapters else None
    return Part(index=index, halves=halves, **dict(adapters[Share(index)]))
