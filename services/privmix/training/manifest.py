"""Describes the contents of an ensemble, so that serving can verify them.

manifest = Manifest.load(directory)
manifest.verify(directory)
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from privmix.engine import PartKind
from privmix.engine.adapter_config import ADAPTER_FILES
from privmix.foundation.errors import ManifestError
from privmix.foundation.files import digest_files, write_atomically
from privmix.foundation.options import problem
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.training import public_model

FILE = "manifest.json"
PRIVATE_BASE = "privmix_private_base"
"""The key of a model's `config.json` that describes its training as a private base (`PrivateBase`)."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Adapter(BaseModel):
    """Describes a PEFT adapter directory, trained on the text of a part's users or of half of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    path: str = Field(description="adapter directory, relative to the manifest")
    sha256: Digest = Field(description="over the adapter's configuration and weights")


class Part(Adapter):
    """Describes one part: its own adapter and, if they were trained, the adapters of the two halves of its users."""

    index: int = Field(ge=0)
    halves: tuple[Adapter, Adapter] | None = None


class PrivateTraining(BaseModel):
    """Records the DP-SGD training of the only part, and its guarantee."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    clip: float = Field(gt=0, description="the L2 norm to which the gradient of each user was clipped")
    blocks: int = Field(ge=1, description="the maximum number of blocks of each user")
    event: DpSgdEvent


class PrivateBase(BaseModel):
    """Describes a base model that DP-SGD trained on private text by user (`privmix.training.private_base`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: Digest = Field(description="the revision of the public model under it")
    adapter: Digest = Field(description="the adapter that was merged into the public model")
    training: PrivateTraining


def private_base(model: Path) -> PrivateBase | None:
    """Returns how a model was trained on private text; None for a public model.

    Raises:
        ManifestError: the description is damaged.
    """
    described = public_model.read_config(model).get(PRIVATE_BASE)
    if described is None:
        return None
    try:
        return PrivateBase.model_validate(described)
    except ValidationError as error:
        raise ManifestError(
            f"model {model}: config.json: {PRIVATE_BASE}.{problem(error)}: it is damaged, so the cost of its training "
            "is unknown; make the base again with `privmix train --base`"
        ) from error


class Manifest(BaseModel):
    """Records the base model, the partition rule and the parts of one ensemble."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    ensemble: str = Field(min_length=1, description="random; stays when the same directory is trained again")
    base_model: str = Field(min_length=1, description="as given to `resolve`: a directory, a hub id, or the default")
    base_revision: Digest
    tokenizer: Digest
    salt_id: str
    part_kind: PartKind = Field(
        description="what a part is: an adapter that attends to the public model's keys and values (reader), plain "
        "LoRA with its own (lora), or the first tokens of its users' text (text)"
    )
    parts: tuple[Part, ...] = Field(min_length=1)
    imported: bool = Field(
        default=False,
        description="the adapters were trained elsewhere: nothing checks that a user's text is in one part alone, nor "
        "what else they depend on",
    )
    dp_sgd: PrivateTraining | None = None
    private_base: PrivateBase | None = Field(
        default=None, description="how the base model was trained on private text; None for a public model"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if [part.index for part in self.parts] != list(range(len(self.parts))):
            raise ValueError("parts: their indices must be 0, 1, 2, … in order, with none missing")
        if self.dp_sgd and (len(self.parts) > 1 or self.parts[0].halves):
            raise ValueError("dp_sgd: trains one part, and no halves")
        if self.dp_sgd and self.part_kind != "lora":
            raise ValueError("part_kind: DP-SGD trains plain LoRA, so it must be lora")
        if self.imported and (self.part_kind != "lora" or self.dp_sgd or self.parts[0].halves):
            raise ValueError("imported: adapters from elsewhere are plain LoRA, without DP-SGD and without halves")
        if self.dp_sgd and self.private_base:
            raise ValueError("private_base: is for ensembles of parts; DP-SGD trains on a public model")
        if len({part.halves is None for part in self.parts}) > 1:
            raise ValueError("parts: some have halves and others have none; all must, or none")
        for field in ("name", "path"):
            if len({getattr(adapter, field) for adapter in self.adapters}) != len(self.adapters):
                raise ValueError(f"parts: two adapters have the same {field}")
        for adapter in self.adapters:
            if Path(adapter.path).is_absolute() or ".." in Path(adapter.path).parts:
                raise ValueError(f"parts: the path of {adapter.name} leaves the ensemble's directory")
        return self

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All adapters of the ensemble: first those of the parts, then those of the halves."""
        return (*self.parts, *(half for part in self.parts for half in part.halves or ()))

    @property
    def partition(self) -> str:
        """Identifies the assignment of users to parts: equal ids give each user the same part."""
        return f"{self.salt_id}, {len(self.parts)} parts"

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads `directory`/manifest.json.

        Raises:
            ManifestError: the file is missing or is not a valid manifest. The message names the field.
        """
        path = directory / FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise ManifestError(f"{directory}: has no {FILE}; train an ensemble into it first") from error
        except OSError as error:
            raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
        except ValidationError as error:
            raise ManifestError(f"{path}: {problem(error)}") from error

    def save(self, directory: Path) -> None:
        """Writes `directory`/manifest.json atomically. Only its owner can read it: hashes depend on private text."""
        write_atomically(directory / FILE, self.model_dump_json(indent=2).encode() + b"\n", private=True)

    def verify(self, directory: Path, base: Path | None = None) -> None:
        """Checks the base model, its tokenizer and every adapter against the hashes in the manifest.

        Args:
            directory: the ensemble's directory.
            base: the base model's directory; None resolves `base_model`.

        Raises:
            ManifestError: a hash differs. The message names the first difference.
            PublicModelError: the base model cannot be found.
        """
        base = base or public_model.resolve(self.base_model)
        self._check_digest("base_revision", public_model.revision(base), f"the base model in {base}")
        self._check_digest("tokenizer", public_model.tokenizer_hash(base), f"the tokenizer in {base}")
        if private_base(base) != self.private_base:
            raise ManifestError(
                f"private_base: the model in {base} and the manifest differ in how it was trained on private text, so "
                "its cost would be wrong; train again"
            )
        again = "import it again" if self.imported else "train again"
        for adapter in self.adapters:
            path = directory / adapter.path
            try:
                digest = hash_adapter(path)
            except OSError as error:
                raise ManifestError(
                    f"{adapter.name}: its adapter {path} is missing, or another user's; {again}"
                ) from error
            if digest != adapter.sha256:
                raise ManifestError(f"{adapter.name}: its adapter {path} is not the one in the manifest; {again}")

    def _check_digest(self, field: str, digest: str, subject: str) -> None:
        expected = getattr(self, field)
        if digest != expected:
            raise ManifestError(
                f"{field}: {subject} is not the one the ensemble was trained with "
                f"(found {digest[:12]}, manifest {expected[:12]})"
            )


def hash_adapter(path: Path) -> str:
    """Returns the SHA-256 (hexadecimal) of an adapter's two files.

    Raises:
        OSError: a file is missing.
    """
    return digest_files(path, ADAPTER_FILES)
