"""A private corpus and a public model to an ensemble of adapters.

    train(Corpus(Path("train.jsonl")), Path("ensemble"), parts=8)

An ensemble's directory holds `manifest.json`, the adapters it names below `parts/` (one for each part and, with
`halves`, one for each half of a part), and the secret salt of the partition. An adapter's directory is named by a
fingerprint of everything it was made from, and appears whole: a killed run goes on where it was, and the old manifest
stays true until the new one takes its place.
"""

import hashlib
import hmac
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from services.training import manifest as manifests
from services.training import public_model
from services.training.corpus import Corpus
from services.training.errors import InputError, TrainingError
from services.training.files import building
from services.training.manifest import Adapter, Manifest, Part, hash_adapter
from services.training.options import Resources, TrainingOptions
from services.training.packing import Tokens, tokenize
from services.training.partition import Partition, Share, read_salt, salt_id
from services.training.progress import Display

PARTS = "parts"
SALT = "partition.salt"
RECEIPT = "receipt.json"
# A change in what training does with the same input must not find the adapters of the old way.
_TRAINING = 1


@dataclass(frozen=True)
class Trained:
    """What `train` did: how many adapters it trained and kept, and how many lines of the corpus it left out."""

    manifest: Manifest
    trained: int
    kept: int
    skipped: int


@dataclass(frozen=True)
class _Base:
    name: str
    path: Path
    revision: str
    tokenizer: str


@dataclass(frozen=True, eq=False)
class _Plan:
    """One adapter to be."""

    share: Share
    tokens: Tokens
    fingerprint: str

    @property
    def path(self) -> str:
        return f"{PARTS}/{self.share.name}-{self.fingerprint[:12]}"

    @property
    def size_bucket(self) -> int:
        size = len(self.tokens)
        return 1 << (size - 1).bit_length() if size else 0

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
    with _only_writer(output), display:
        display.say("preparing the public model")
        base = _find_base(model)
        _check_block(base, options)
        salt = read_salt(salt_file or output / SALT)
        display.say("reading the corpus")
        plans = _plan(corpus, base, Partition(salt, parts, halves), options)
        missing = [plan for plan in plans if _finished(output, plan) is None]
        _train_missing(missing, output, base, options, resources, display)
        manifest = _manifest(plans, output, base, salt, options)
        manifest.save(output)
        _remove_others(output, manifest)
    return Trained(manifest, trained=len(missing), kept=len(plans) - len(missing), skipped=corpus.skipped)


@contextmanager
def _only_writer(output: Path) -> Iterator[None]:
    try:
        (output / PARTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {output}: cannot be made: {error.strerror}") from error
    try:
        with FileLock(output / ".training.lock", timeout=0):
            yield
    except Timeout as error:
        raise TrainingError(f"output {output}: another training is writing to it; wait for it or stop it") from error


def _find_base(model: str | None) -> _Base:
    path = public_model.resolve(model)
    name = str(path) if model and Path(model).expanduser().is_dir() else model or public_model.DEFAULT
    return _Base(name, path, public_model.revision(path), public_model.tokenizer_hash(path))


def _check_block(base: _Base, options: TrainingOptions) -> None:
    from transformers import AutoConfig

    context = getattr(AutoConfig.from_pretrained(base.path).get_text_config(), "max_position_embeddings", None)
    if context is not None and options.block > context:
        raise InputError(f"block: {options.block} tokens are more than the model's context of {context}")


def _plan(corpus: Corpus, base: _Base, partition: Partition, options: TrainingOptions) -> list[_Plan]:
    from transformers import AutoTokenizer

    streams = tokenize(corpus, AutoTokenizer.from_pretrained(base.path), partition)
    if not any(len(tokens) for tokens in streams.values()):
        raise InputError(f"corpus {corpus.path}: has no documents")
    return [
        _Plan(share, tokens, _fingerprint(tokens, base, partition.salt, options)) for share, tokens in streams.items()
    ]


def _fingerprint(tokens: Tokens, base: _Base, salt: bytes, options: TrainingOptions) -> str:
    # Keyed, because the name of a directory must not let anyone test a guess at the part's text.
    key = hashlib.sha256(b"privmix part fingerprint\0" + salt).digest()
    recipe = [_TRAINING, base.revision, base.tokenizer, options.model_dump(mode="json")]
    digest = hmac.new(key, json.dumps(recipe, sort_keys=True).encode() + b"\0", "sha256")
    digest.update(tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def _finished(output: Path, plan: _Plan) -> str | None:
    """The hash of the planned adapter, when it is there and whole."""
    directory = output / plan.path
    try:
        receipt = json.loads((directory / RECEIPT).read_bytes())
        intact = receipt == {"fingerprint": plan.fingerprint, "sha256": hash_adapter(directory)}
        return receipt["sha256"] if intact else None
    except (OSError, ValueError):
        return None


def _train_missing(
    missing: list[_Plan],
    output: Path,
    base: _Base,
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
            _store(output, jobs[job], files)


def _store(output: Path, plan: _Plan, files: dict[str, bytes]) -> None:
    with building(output / plan.path) as directory:
        for name, content in files.items():
            (directory / name).write_bytes(content)
        receipt = {"fingerprint": plan.fingerprint, "sha256": hash_adapter(directory)}
        (directory / RECEIPT).write_text(json.dumps(receipt))


def _manifest(plans: list[_Plan], output: Path, base: _Base, salt: bytes, options: TrainingOptions) -> Manifest:
    adapters = {plan.share: _adapter(plan, output) for plan in plans}
    return Manifest(
        ensemble=_ensemble_id(output),
        base_model=base.name,
        base_revision=base.revision,
        tokenizer=base.tokenizer,
        salt_id=salt_id(salt),
        rank=options.rank,
        parts=tuple(_part(share.part, adapters) for share in adapters if share.half is None),
    )


def _adapter(plan: _Plan, output: Path) -> Adapter:
    digest = _finished(output, plan)
    if digest is None:
        raise TrainingError(f"{plan.share.name}: its adapter is gone or damaged; run again to train it")
    return Adapter(name=plan.share.name, path=plan.path, sha256=digest, size_bucket=plan.size_bucket)


def _part(index: int, adapters: Mapping[Share, Adapter]) -> Part:
    first, second = Share(index, 0), Share(index, 1)
    halves = (adapters[first], adapters[second]) if first in adapters else None
    return Part(index=index, halves=halves, **dict(adapters[Share(index)]))


def _ensemble_id(output: Path) -> str:
    # The same users are in an ensemble that is trained again, so what it cost them goes on under the same name.
    if (output / manifests.FILE).exists():
        return Manifest.load(output).ensemble
    return uuid.uuid4().hex


def _remove_others(output: Path, manifest: Manifest) -> None:
    """Adapters that no manifest names any more hold private text to no purpose."""
    named = {Path(adapter.path).name for adapter in manifest.adapters}
    for directory in (output / PARTS).iterdir():
        if directory.name not in named:
            shutil.rmtree(directory, ignore_errors=True)
