"""Manages an ensemble's directory during training: it has one writer, and adapters appear atomically.

The directory holds `manifest.json`, the adapters that the manifest names below `parts/`, and the secret salt of the
partition. The name of an adapter's directory contains a fingerprint of all its inputs. So a killed training can
continue, and the old manifest stays valid until the new one replaces it.
"""

import hashlib
import hmac
import json
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from privmix.foundation.errors import InputError
from privmix.foundation.files import building, write_files
from privmix.training import manifest as manifests
from privmix.training.manifest import Manifest, hash_adapter
from privmix.training.packing import Tokens
from privmix.training.partition import salt_id

PARTS = "parts"
SALT = "partition.salt"
RECEIPT = "receipt.json"


def fingerprint(kind: str, salt: bytes, recipe: Sequence[object], texts: Iterable[Tokens]) -> str:
    """Returns a hash of all that a training depends on: a recipe as JSON, and tokens, int32 [tokens] each."""
    # The hash has a secret key, because the name of a directory must not reveal whether a guess of the text is right.
    key = hashlib.sha256(f"privmix {kind} fingerprint\0".encode() + salt).digest()
    digest = hmac.new(key, json.dumps(recipe, sort_keys=True).encode() + b"\0", "sha256")
    for text in texts:
        digest.update(text.astype("<i4").tobytes())
    return digest.hexdigest()


def adapter_path(name: str, fingerprint: str) -> str:
    """Returns the path of an adapter's directory, relative to the ensemble's directory."""
    return f"{PARTS}/{name}-{fingerprint[:12]}"


def finished(directory: Path, fingerprint: str) -> str | None:
    """Returns the hash of the adapter in `directory`; None if it is missing, damaged or has another fingerprint."""
    try:
        receipt = json.loads((directory / RECEIPT).read_bytes())
        intact = receipt == {"fingerprint": fingerprint, "sha256": hash_adapter(directory)}
        return receipt["sha256"] if intact else None
    except (OSError, ValueError):
        return None


def store(directory: Path, fingerprint: str, files: Mapping[str, bytes]) -> None:
    """Writes an adapter's files atomically. Only their owner can read them: they are as private as the text."""
    with building(directory, private=True) as unfinished:
        write_files(unfinished, files)
        receipt = {"fingerprint": fingerprint, "sha256": hash_adapter(unfinished)}
        (unfinished / RECEIPT).write_text(json.dumps(receipt))


def ensemble_id(output: Path) -> str:
    """Returns the ensemble's id from its manifest, or a new id.

    An ensemble keeps its id when it is trained again: it contains the same users, so their privacy cost accumulates.
    """
    if (output / manifests.FILE).exists():
        return Manifest.load(output).ensemble
    return uuid.uuid4().hex


def check_salt(output: Path, salt: bytes) -> None:
    """Checks that the next training of an ensemble divides the users as its earlier ones did.

    Raises:
        InputError: the ensemble in this directory was trained with another salt.
    """
    if (output / manifests.FILE).exists() and Manifest.load(output).salt_id != salt_id(salt):
        raise InputError(
            f"salt: {output} was trained with another salt, which divides its users in another way; restore the salt, "
            "or train into another directory"
        )


def remove_others(output: Path, manifest: Manifest) -> None:
    """Removes the adapters that the manifest does not name, because they contain private text without need."""
    named = {Path(adapter.path).name for adapter in manifest.adapters}
    for directory in (output / PARTS).glob("*"):
        if directory.name not in named:
            shutil.rmtree(directory, ignore_errors=True)
