"""Trains one adapter with DP-SGD from a private corpus and a public model.

    run_training(plan(Corpus(Path("train.jsonl")), Path("ensemble"), private=DpSgdOptions(epsilon=8)))

The output is an ensemble of one part, whose manifest records the guarantee and the privacy event.
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from privmix.foundation.errors import InputError
from privmix.foundation.files import only_writer
from privmix.privacy.protocols.dp_sgd import DpSgdEvent, full_batch_noise, noise_multiplier
from privmix.tokenization.people_text import PeopleText
from privmix.training.base import Base, find_base
from privmix.training.corpus import Corpus
from privmix.training.directory import SALT, check_salt, fingerprint
from privmix.training.manifest import Manifest, Part, PrivateTraining
from privmix.training.options import DP_SGD_TRAINING, DpSgdOptions, TrainingOptions
from privmix.training.packing import Tokens, contributions
from privmix.training.partition import PartShare, read_salt, salt_id
from privmix.training.plan import PlannedAdapter, Recipe, TrainingPlan, manifest_of

RECORD = "dp_sgd.json"
"""The file beside an adapter that records its training, which is charged once for all later serving."""

UNUSED = {"part_kind", "text", "layers", "batch", "epochs"}
"""The options of a training that do not change what DP-SGD trains."""

# Increase this number when the training's result for the same input changes, so that old adapters are not reused.
_TRAINING = 6
_NAME = PartShare(0).name
_SEED = 0


@contextmanager
def plan(
    corpus: Corpus,
    output: Path,
    *,
    private: DpSgdOptions | None = None,
    model: str | None = None,
    options: TrainingOptions | None = None,
    salt_file: Path | None = None,
) -> Iterator[TrainingPlan]:
    """Plans one adapter in `output`. Keeps an existing adapter of the same input. Locks `output` meanwhile.

    The privacy event depends on the options alone. `options.batch` and `options.epochs` are not used: a step takes all
    units, or a batch of `private.expected_batch` of them.

    A training that is killed begins again: it has released nothing. A second training on the same text costs as much as
    the first.

    Raises:
        InputError: an argument is invalid (includes `CorpusError`, `PublicModelError` and `ManifestError`).
        WorkError: another training is writing to `output`.
    """
    private, options = private or DpSgdOptions(), options or DP_SGD_TRAINING
    if options.part_kind != "lora":
        raise InputError("part_kind: DP-SGD trains plain LoRA, with keys and values of its own; choose lora")
    with only_writer(output, "training"):
        base = find_base(model, options)
        if base.private is not None:
            raise InputError(
                f"model {base.name}: was trained on private text itself; train with DP-SGD on a public model, with all "
                "of epsilon"
            )
        salt = read_salt(salt_file or output / SALT)
        check_salt(output, salt)
        tokenizer = base.load_tokenizer()
        corpus.people = PeopleText(tokenizer)
        limit = private.blocks * options.block
        units = corpus.read_into(partial(contributions, tokenizer=tokenizer, limit=limit, block=corpus.block))
        chosen = [private.model_dump(mode="json"), options.model_dump(mode="json", exclude=UNUSED)]
        recipe = [_TRAINING, base.revision, base.tokenizer, *chosen, [len(unit) for unit in units]]
        name = fingerprint("dp-sgd", salt, recipe, units)
        adapter = PlannedAdapter(_NAME, name, partial(_recipe, units, private, options))
        yield TrainingPlan(
            output,
            base,
            [adapter],
            options.part_kind,
            manifest=lambda: _manifest(output, adapter, base, salt, options),
            skipped=dict(corpus.skipped),
        )


def planned(private: DpSgdOptions, *, roughly: bool = False) -> DpSgdEvent:
    """Returns the privacy event of a training, with the smallest noise that meets epsilon and delta.

    Args:
        roughly: up to some 1e-4 less noise, for a comparison of many: asking dp-accounting takes part of a second.

    Raises:
        InputError: no noise meets epsilon and delta.
    """
    rate, steps = private.sampling_rate, private.steps
    try:
        if roughly and rate == 1:
            noise = full_batch_noise(private.epsilon, private.delta, steps)
        else:
            noise = noise_multiplier(private.epsilon, private.delta, rate, steps)
    except ValueError as error:
        raise InputError(f"epsilon: {error}") from error
    return DpSgdEvent("user", noise, rate, steps, uuid.uuid4().hex)


def _recipe(units: Sequence[Tokens], private: DpSgdOptions, options: TrainingOptions) -> Recipe:
    from privmix.training import per_unit

    event = planned(private)
    work = partial(
        per_unit.train_adapter,
        units=units,
        options=options,
        seed=_SEED,
        noise_multiplier=event.noise_multiplier,
        sampling_rate=event.sampling_rate,
        steps=event.steps,
        clip=private.clip,
    )
    chosen = private.model_dump(include={"epsilon", "delta", "clip", "blocks"})
    record = PrivateTraining(**chosen, event=event)
    batch = "all users" if event.sampling_rate == 1 else f"a rate of {event.sampling_rate:g}"
    note = f"noise {event.noise_multiplier:.3f}, {event.steps} steps of {batch}"
    return Recipe(work, {RECORD: record.model_dump_json().encode()}, note)


def _manifest(output: Path, adapter: PlannedAdapter, base: Base, salt: bytes, options: TrainingOptions) -> Manifest:
    part = Part(index=0, **dict(adapter.trained(output)))
    training = PrivateTraining.model_validate_json((output / adapter.path / RECORD).read_bytes())
    return manifest_of(output, base, salt_id(salt), options, (part,), training)
