"""Claim: the salt assigns every user to one part and one of its halves, uniformly and reproducibly."""

import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from privmix.foundation.errors import InputError
from privmix.training.partition import Partition, PartShare, half_of, part_of, read_salt, salt_id

SALT = bytes(range(32))


def test_the_partition_matches_known_hashes() -> None:
    # OpenSSL's HMAC-SHA256 with the key 00 01 … 1f is 0d1f … 3242 for ann and 9289 … 4527 for bob. The partition of
    # existing ensembles must never change.
    assert (part_of("ann", SALT, 2**16), half_of("ann", SALT)) == (0x3242, 0)
    assert (part_of("bob", SALT, 2**16), half_of("bob", SALT)) == (0x4527, 1)


@given(st.text(st.characters(codec="utf-8")), st.integers(1, 1000))
def test_a_user_is_in_one_part_and_one_half_of_it(user: str, parts: int) -> None:
    partition = Partition(SALT, parts, halves=True)
    whole, half = partition.shares_of(user)
    assert whole == PartShare(part_of(user, SALT, parts))
    assert half == PartShare(whole.part, half_of(user, SALT))
    assert (whole,) == Partition(SALT, parts).shares_of(user)
    assert {whole, half} < set(partition.shares)


# With a power of two, the part depends on the last bits of the hash alone; with another number, on all of them.
@pytest.mark.parametrize("parts", [1, 7, 8])
def test_halves_are_equally_likely_in_every_part(parts: int) -> None:
    partition = Partition(SALT, parts, halves=True)
    counts = Counter(partition.shares_of(f"user-{number}")[1] for number in range(14_000))
    assert len(counts) == 2 * parts
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_the_salt_is_drawn_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    salt = read_salt(path)
    assert len(salt) == 32
    assert read_salt(path) == salt
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_salt(tmp_path / "other") != salt
    assert salt.hex() not in salt_id(salt)


def test_concurrent_draws_give_one_salt(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        salts = set(pool.map(read_salt, [tmp_path / "salt"] * 64))
    assert len(salts) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["salt"]


def test_damaged_salt_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    path.write_bytes(b"short")
    with pytest.raises(InputError, match="has 5 bytes, not 32"):
        read_salt(path)
    assert path.read_bytes() == b"short"
