"""Trains an ensemble of adapters from a private corpus and a public model.

    run_training(plan(Corpus(Path("train.jsonl")), Path("ensemble"), parts=8))

It trains one adapter for each part and, with `halves`, one for each half of a part. See `directory` for the layout.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from privmix.foundation.errors import InputError
from privmix.foundation.files import only_writer
from privmix.tokenization.people_text import PeopleText
from privmix.training.base import Base, find_base
from privmix.training.corpus import Corpus
from privmix.training.directory import SALT, check_salt, fingerprint
from privmix.training.manifest import Adapter, Manifest, Part
from privmix.training.options import TrainingOptions
from privmix.training.packing import Tokens, tokenize
from privmix.training.partition import Partition, PartShare, read_salt, salt_id
from privmix.training.plan import PlannedAdapter, Recipe, TrainingPlan, manifest_of

# Increase this number when the training's result for the same input changes, so that old adapters are not reused.
_TRAINING = 6


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
) -> Iterator[TrainingPlan]:
    """Plans an ensemble in `output`, new or to complete. Locks `output` meanwhile.

    Adapters whose text has not changed are kept.

    Args:
        parts: the number of parts. A keyed hash of a user's id determines the user's part.
        halves: also train an adapter for each of the two halves into which the hash divides a part's users. Without
            it, existing adapters of halves are removed.
        model: see `public_model.resolve`.
        salt_file: the file of the partition's secret, created on first use; by default `output`/partition.salt.

    Raises:
        InputError: an argument is invalid (includes `CorpusError`, `PublicModelError` and `ManifestError`).
        WorkError: another training is writing to `output`.
    """
    options = options or TrainingOptions()
    if parts < 1:
        raise InputError(f"parts: must be at least 1, not {parts}")
    with only_writer(output, "training"):
        base = find_base(model, options)
        options = options.for_depth(base.layers)
        salt = read_salt(salt_file or output / SALT)
        tokenizer = base.load_tokenizer()
        corpus.people = PeopleText(tokenizer)
        check_salt(output, salt)
        partition = Partition(salt, parts, halves)
        text = corpus.read_into(partial(tokenize, tokenizer=tokenizer, partition=partition, block=corpus.block))
        planned = _planned(text, base, salt, options)
        yield TrainingPlan(
            output,
            base,
            [*planned.values()],
            options.part_kind,
            manifest=lambda: _manifest(planned, output, base, salt, options),
            skipped=dict(corpus.skipped),
        )


def _planned(
    streams: Mapping[PartShare, Tokens], base: Base, salt: bytes, options: TrainingOptions
) -> dict[PartShare, PlannedAdapter]:
    recipe = [_TRAINING, base.revision, base.tokenizer, options.recipe]
    return {
        share: PlannedAdapter(
            share.name, fingerprint("part", salt, recipe, [tokens]), partial(_recipe, share, tokens, options)
        )
        for share, tokens in streams.items()
    }


def _recipe(share: PartShare, tokens: Tokens, options: TrainingOptions) -> Recipe:
    if options.part_kind == "text":
        return Recipe(partial(_text, tokens, options.text))
    from privmix.training.adapter import train_adapter

    return Recipe(partial(train_adapter, tokens=tokens, options=options, seed=_seed(share)))


def _text(
    tokens: Tokens, size: int, base: Path, base_name: str, *, report: Callable[[float], None]
) -> dict[str, bytes]:
    from privmix.engine.part_text import text_files

    return text_files(tokens, size)


def _seed(share: PartShare) -> int:
    # The halves of a part start from the same weights, so that only their texts make them differ.
    return int.from_bytes(hashlib.sha256(f"privmix part {share.part}".encode()).digest()[:7], "big")


def _manifest(
    planned: Mapping[PartShare, PlannedAdapter], output: Path, base: Base, salt: bytes, options: TrainingOptions
) -> Manifest:
    adapters = {share: adapter.trained(output) for share, adapter in planned.items()}
    parts = tuple(_part(share.part, adapters) for share in adapters if share.half is None)
    return manifest_of(output, base, salt_id(salt), options, parts)


def _part(index: int, adapters: Mapping[PartShare, Adapter]) -> Part:
    first, second = PartShare(index, 0), PartShare(index, 1)
    halves = (adapters[first], adapters[second]) if first in adapters else None
    return Part(index=index, halves=halves, **dict(adapters[PartShare(index)]))
