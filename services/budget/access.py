"""What a ledger is opened for."""

from typing import Literal

Access = Literal["read", "write", "create"]
