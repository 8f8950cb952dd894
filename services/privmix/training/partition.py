"""Assigns each user to a part, and to a half of it, by a keyed hash of the user's id and nothing else.

The assignment must not depend on other users (no balancing, no order of arrival). Otherwise one user's text would
change several part models, and the guarantee would not protect users. The key is secret, so that nobody can tell which
users share a part.
"""

import hashlib
import hmac
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from privmix.foundation.errors import InputError
from privmix.foundation.files import create_atomically

SALT_BYTES = 32
HALVES = ("a", "b")


@dataclass(frozen=True, slots=True)
class PartShare:
    """Identifies the users whose text trains one adapter: those of a part, or of half a part.

    Args:
        half: 0 or 1; None for the whole part.
    """

    part: int
    half: int | None = None

    @property
    def name(self) -> str:
        """The share's name: `part-003` for a part, `part-003a` and `part-003b` for its halves."""
        return f"part-{self.part:03d}" + ("" if self.half is None else HALVES[self.half])


@dataclass(frozen=True)
class Partition:
    """Divides users into the parts of an ensemble and, with `halves`, each part into two halves (used by SubMix)."""

    salt: bytes
    parts: int
    halves: bool = False

    @property
    def shares(self) -> tuple[PartShare, ...]:
        """The parts in order, then their halves."""
        whole = tuple(PartShare(part) for part in range(self.parts))
        return whole + (tuple(PartShare(share.part, half) for share in whole for half in (0, 1)) if self.halves else ())

    def shares_of(self, user: str) -> tuple[PartShare, ...]:
        """Returns the shares that contain a user's text."""
        part = part_of(user, self.salt, self.parts)
        return (PartShare(part), PartShare(part, half_of(user, self.salt))) if self.halves else (PartShare(part),)


def part_of(user: str, salt: bytes, parts: int) -> int:
    """Returns the index, in [0, parts), of a user's part.

    It is the remainder of a 256-bit number, so the probabilities of two indices differ by at most parts / 2**256.
    """
    return _number(user, salt) % parts


def half_of(user: str, salt: bytes) -> int:
    """Returns the half, 0 or 1, of the user's part.

    It is the first bit of the number whose remainder is the part. The other 255 bits are uniform and independent of it,
    so the half reveals almost nothing about the part: the probabilities of two pairs of part and half differ by at most
    parts / 2**255.
    """
    return _number(user, salt) >> 255


def read_salt(path: Path) -> bytes:
    """Reads the secret salt, 32 bytes. If there is none, draws one and writes it, readable by its owner only.

    Raises:
        InputError: the file cannot be read or does not hold 32 bytes.
    """
    if not path.exists():
        with suppress(FileExistsError):  # another process has just written one
            create_atomically(path, secrets.token_bytes(SALT_BYTES), private=True)
    try:
        salt = path.read_bytes()
    except OSError as error:
        raise InputError(f"salt {path}: cannot be read: {error.strerror}") from error
    if len(salt) != SALT_BYTES:
        raise InputError(
            f"salt {path}: has {len(salt)} bytes, not {SALT_BYTES}; restore it, "
            "or remove it to draw a new one (all users are then reassigned and all parts trained again)"
        )
    return salt


def salt_id(salt: bytes) -> str:
    """Returns a short public id of a salt, which identifies a partition without revealing the salt."""
    return hashlib.sha256(b"privmix salt id\0" + salt).hexdigest()[:16]


def _number(user: str, salt: bytes) -> int:
    return int.from_bytes(hmac.digest(salt, user.encode(), "sha256"), "big")
