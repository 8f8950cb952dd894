"""What an ensemble is made of, so that serving can refuse anything else.

manifest = Manifest.load(directory)
manifest.verify(directory)
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from services.errors import InputError
from services.files import digest_files, write_atomically
from services.privacy.protocols.dp_sgd import DpSgdEvent
from services.training import public_model
from services.training.options import Attention

FILE = "manifest.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ManifestError(InputError):
    """The ensemble is not what its manifest says, or has none; the message names what differs."""


class Adapter(BaseModel):
    """One model: a PEFT adapter directory, trained on the text of a part's users or of half of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    path: str = Field(description="adapter directory, relative to the manifest")
    sha256: Digest = Field(description="over the adapter's configuration and weights")
    # A power of two depends on the private text all the same: one user's lines can move a part across a boundary.
    # So it is for the operator, who holds the corpus, to see gross imbalance; like the hashes, it must not leave the
    # service.
    size_bucket: int = Field(ge=0, description="training tokens, rounded up to a power of two; 0 for none")


class Part(Adapter):
    """One part: its own model and, where they were trained, those of the two halves of its users."""

    index: int = Field(ge=0)
    halves: tuple[Adapter, Adapter] | None = None


class PrivateTraining(BaseModel):
    """How DP-SGD trained the only part, and what it keeps to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    clip: float = Field(gt=0, description="the length that the gradient of each record, or user, was clipped to")
    blocks: int = Field(ge=1, description="of the text of each of them")
    event: DpSgdEvent


class Manifest(BaseModel):
    """Base model, partition rule and parts of one ensemble."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    ensemble: str = Field(min_length=1, description="random; stays when the same directory is trained again")
    base_model: str = Field(min_length=1, description="as given to `resolve`: a directory, a hub id, or the default")
    base_revision: Digest
    tokenizer: Digest
    partition_rule: Literal["hmac-sha256"] = "hmac-sha256"
    salt_id: str
    rank: int = Field(ge=1)
    attention: Attention = Field(
        default="own",
        description="whose keys and values an adapter attends to: those of the public model (a reader, see "
        "`services.engine.reader_attention`), or its own (plain LoRA, and every manifest without this field)",
    )
    parts: tuple[Part, ...] = Field(min_length=1)
    dp_sgd: PrivateTraining | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if [part.index for part in self.parts] != list(range(len(self.parts))):
            raise ValueError("parts: their indices must be 0, 1, 2, … in order, with none missing")
        if self.dp_sgd and (len(self.parts) > 1 or self.parts[0].halves):
            raise ValueError("dp_sgd: trains one part, and no halves")
        if self.dp_sgd and self.attention == "public":
            raise ValueError("attention: an adapter of dp_sgd attends to its own keys and values")
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
        """Every adapter of the ensemble: those of the parts, then those of their halves."""
        return (*self.parts, *(half for part in self.parts for half in part.halves or ()))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `directory`/manifest.json.

        Raises:
            ManifestError: there is none, or it is not a manifest; the message names the field.
        """
        path = directory / FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise ManifestError(f"{directory}: has no {FILE}; train an ensemble into it first") from error
        except OSError as error:
            raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(step) for step in first["loc"]) or FILE
            raise ManifestError(f"{path}: {field}: {first['msg']}") from error

    def save(self, directory: Path) -> None:
        """Write `directory`/manifest.json, atomically."""
        write_atomically(directory / FILE, self.model_dump_json(indent=2).encode() + b"\n")

    def adapter_path(self, directory: Path, adapter: Adapter) -> Path:
        """Where an adapter is, when the ensemble is in `directory`."""
        return directory / adapter.path

    def verify(self, directory: Path, base: Path | None = None) -> None:
        """Check that the base model, its tokenizer and every adapter are the ones the ensemble was trained with.

        Args:
            directory: the ensemble's.
            base: the base model's directory; None resolves `base_model`.

        Raises:
            ManifestError: names the first thing that differs.
            PublicModelError: the base model cannot be found.
        """
        base = base or public_model.resolve(self.base_model)
        self._same("base_revision", public_model.revision(base), f"the base model in {base}")
        self._same("tokenizer", public_model.tokenizer_hash(base), f"the tokenizer in {base}")
        for adapter in self.adapters:
            path = self.adapter_path(directory, adapter)
            try:
                found = hash_adapter(path)
            except OSError as error:
                raise ManifestError(
                    f"{adapter.name}: its adapter {path} is missing; train again to restore it"
                ) from error
            if found != adapter.sha256:
                raise ManifestError(f"{adapter.name}: its adapter {path} is not the one in the manifest; train again")

    def _same(self, field: str, found: str, what: str) -> None:
        expected = getattr(self, field)
        if found != expected:
            raise ManifestError(
                f"{field}: {what} is not the one the ensemble was trained with "
                f"(found {found[:12]}, manifest {expected[:12]})"
            )


def hash_adapter(path: Path) -> str:
    """SHA-256 (hexadecimal) over an adapter's two files.

    Raises:
        OSError: one is missing.
    """
    return digest_files(path, ADAPTER_FILES)
