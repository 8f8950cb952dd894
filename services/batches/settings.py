"""What an operator says of batches."""

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

DAY_S = 86_400


class BatchSettings(BaseModel):
    """Attributes:
    enabled: keep files for clients, and run batches of them. The files hold the clients' prompts.
    max_file_bytes: of one file.
    max_stored_bytes: of all files of one key.
    max_lines: of one batch.
    retention_days: after which files and batches are deleted, unless their client did so before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    enabled: bool = True
    max_file_bytes: PositiveInt = 16 << 20
    max_stored_bytes: PositiveInt = 256 << 20
    max_lines: PositiveInt = 10_000
    retention_days: float = Field(30.0, gt=0, le=365)

    @property
    def retention_s(self) -> int:
        return max(1, round(self.retention_days * DAY_S))
