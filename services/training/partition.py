"""Which part a user's text goes to, and which half of it: a keyed hash of the user's id, and nothing else.

A part must not depend on other users (no balancing, no order of arrival), or one user's text would change more than
one part model and the guarantee would not be about users; the same holds for its halves. The key is secret so that
nobody can tell who is together.
"""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from services.errors import InputError

RULE = "hmac-sha256"
SALT_BYTES = 32
HALVES = ("a", "b")


@dataclass(frozen=True, slots=True)
class Share:
    """The users whose text makes one adapter: those of a part, or of half a part.

    Args:
        half: 0 or 1; None is the whole part.
    """

    part: int
    half: int | None = None

    @property
    def name(self) -> str:
        """`part-003` and its halves `part-003a` and `part-003b`."""
        return f"part-{self.part:03d}" + ("" if self.half is None else HALVES[self.half])


@dataclass(frozen=True)
class Partition:
    """All the shares of an ensemble: its parts and, with `halves`, the two halves of each (what SubMix compares)."""

    salt: bytes
    parts: int
    halves: bool = False

    @property
    def shares(self) -> tuple[Share, ...]:
        """The parts in order, then their halves."""
        whole = tuple(Share(part) for part in range(self.parts))
        return whole + (tuple(Share(one.part, half) for one in whole for half in (0, 1)) if self.halves else ())

    def shares_of(self, user: str) -> tuple[Share, ...]:
        """Those that a user's text belongs to."""
        part = part_of(user, self.salt, self.parts)
        return (Share(part), Share(part, half_of(user, self.salt))) if self.halves else (Share(part),)


def part_of(user: str, salt: bytes, parts: int) -> int:
    """The index, in [0, parts), of the part a user belongs to.

    The remainder of a 256-bit number: no index is more likely than another by more than parts / 2**256.
    """
    return _number(user, salt) % parts


def half_of(user: str, salt: bytes) -> int:
    """The half, 0 or 1, of whichever part a user belongs to.

    The first bit of the number whose remainder is the part. The 255 bits after it are uniform whatever it is, so it
    says next to nothing about the part: no pair of part and half is more likely than another by more than
    parts / 2**255.
    """
    return _number(user, salt) >> 255


def read_salt(path: Path) -> bytes:
    """The secret salt in `path`, 32 bytes; drawn and written (readable by its owner alone) when there is none.

    Raises:
        InputError: the file does not hold 32 bytes.
    """
    if not path.exists():
        _create_salt(path)
    salt = path.read_bytes()
    if len(salt) != SALT_BYTES:
        raise InputError(
            f"salt {path}: has {len(salt)} bytes, not {SALT_BYTES}; restore it, "
            "or remove it to draw another (every user is then assigned anew and every part trained again)"
        )
    return salt


def salt_id(salt: bytes) -> str:
    """A short public name of a salt, by which a partition is recognised without knowing the salt."""
    return hashlib.sha256(b"privmix salt id\0" + salt).hexdigest()[:16]


def _number(user: str, salt: bytes) -> int:
    return int.from_bytes(hmac.digest(salt, user.encode(), "sha256"), "big")


def _create_salt(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SALT_BYTES))
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces a salt that another process has written meanwhile.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
