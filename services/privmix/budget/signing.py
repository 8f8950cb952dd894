"""Signs the end of a ledger's chain with a secret key that its database does not hold.

The chain alone shows a changed row, but not a chain that was rewritten to its end: hashes need no secret. A writer with
a key ends each commit with a row (`records.Signed`) that has an HMAC-SHA256 (RFC 2104) of the hash before it, and so of
all earlier rows. Nobody without the key can write such a row. A chain that was cut after one of them stays valid: that
is what anchors are for.
"""

import hmac
from dataclasses import dataclass
from typing import Self

from privmix.budget.records import Signed
from privmix.budget.state import Balance
from privmix.foundation.errors import InputError, LedgerUnsigned

LEAST_BYTES = 32

_ROW, _NAME = b"privmix ledger row ", b"privmix ledger key"


@dataclass(frozen=True)
class SigningKey:
    """A secret of at least `LEAST_BYTES` bytes.

    Raises:
        InputError: it is shorter.
    """

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) < LEAST_BYTES:
            raise InputError(
                f"budget.signing_key: must have at least {LEAST_BYTES} characters; make one with `openssl rand -hex 32`"
            )

    @classmethod
    def of(cls, text: str | None) -> Self | None:
        """Returns the key with a text; None without one. Space around it does not count.

        Raises:
            InputError: the key is too short.
        """
        return None if text is None else cls(text.strip().encode())

    @property
    def name(self) -> str:
        """A public name, which does not tell the key."""
        return self._mac(_NAME)[:16]

    def record(self, head: str) -> Signed:
        """Returns the record that signs a chain whose last row has the hash `head`."""
        return Signed(key=self.name, signature=self._mac(_ROW + head.encode()))

    def check(self, balance: Balance) -> None:
        """Checks that this key signed the whole chain.

        Raises:
            LedgerUnsigned: it did not.
        """
        if balance.signature is None:
            raise _unsigned(f"no row of it was signed, but the key {self.name} is configured")
        row, signed = balance.signature
        if signed.key != self.name:
            raise _unsigned(f"row {row.seq} was signed with the key {signed.key}, not with {self.name}")
        if not hmac.compare_digest(signed.signature, self._mac(_ROW + row.previous.encode())):
            raise _unsigned(f"the signature in row {row.seq} is not that of the key {self.name}")
        if row.seq < balance.rows:
            raise _unsigned(f"its rows from {row.seq + 1} to {balance.rows} are not signed")

    def _mac(self, message: bytes) -> str:
        return hmac.digest(self.secret, message, "sha256").hex()

    def __repr__(self) -> str:
        return f"SigningKey({self.name})"


def _unsigned(problem: str) -> LedgerUnsigned:
    return LedgerUnsigned(
        f"{problem}: it was rewritten, or written by a service without this key. Compare it with a backup. Only if "
        "the key is new: stop the service and run `privmix ledger init`, which verifies the chain and signs it"
    )
