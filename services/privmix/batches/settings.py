"""Defines the operator's settings for batches."""

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

DAY_S = 86_400


class BatchSettings(BaseModel):
    """Holds the section `batches` of the configuration.

    Attributes:
        enabled: store files for clients and run batches. The files contain the clients' prompts.
        files: where they are: a directory on the head node, or an object store's URL of fsspec. None: `files` beside
            the keys' SQLite file.
        max_file_bytes: the largest file.
        max_stored_bytes: the largest total of all files of one key.
        max_files: the largest number of files of one key.
        changes_per_minute: the uploads, deletions and new batches of one key at one gateway.
        max_lines: the largest number of requests in one batch.
        retention_days: the age at which files and batches are deleted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    enabled: bool = True
    files: str | None = Field(None, min_length=1)
    max_file_bytes: PositiveInt = 16 << 20
    max_stored_bytes: PositiveInt = 256 << 20
    max_files: PositiveInt = 1_000
    changes_per_minute: PositiveInt = 60
    max_lines: PositiveInt = 10_000
    retention_days: float = Field(30.0, gt=0, le=365)

    @property
    def retention_s(self) -> int:
        """The retention time in seconds."""
        return max(1, round(self.retention_days * DAY_S))
