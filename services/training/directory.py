"""An ensemble's directory while it is trained: one writer, and adapters that are there whole or not at all.

It holds `manifest.json`, the adapters that this names below `parts/`, and the secret salt of the partition. An
adapter's directory is named by a fingerprint of everything it was made from: a killed run goes on where it was, and
the old manifest stays true until the new one takes its place.
"""

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from services.errors import InputError, WorkError
from services.files import building
from services.training import manifest as manifests
from services.training.manifest import Manifest, hash_adapter

PARTS = "parts"
SALT = "partition.salt"
RECEIPT = "receipt.json"


@contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Makes the directory, and keeps every other training out of it.

    Raises:
        InputError: it cannot be made.
        WorkError: another training is writing to it.
    """
    try:
        (output / PARTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {output}: cannot be made: {error.strerror}") from error
    try:
        with FileLock(output / ".training.lock", timeout=0):
            yield
    except Timeout as error:
        raise WorkError(f"output {output}: another training is writing to it; wait for it or stop it") from error


def adapter_path(name: str, fingerprint: str) -> str:
    """Where an adapter of this name and fingerprint belongs, relative to the ensemble's directory."""
    return f"{PARTS}/{name}-{fingerprint[:12]}"


def finished(directory: Path, fingerprint: str) -> str | None:
    """The hash of the adapter in `directory`, when it is that of the fingerprint and whole."""
    try:
        receipt = json.loads((directory / RECEIPT).read_bytes())
        intact = receipt == {"fingerprint": fingerprint, "sha256": hash_adapter(directory)}
        return receipt["sha256"] if intact else None
    except (OSError, ValueError):
        return None


def store(directory: Path, fingerprint: str, files: Mapping[str, bytes]) -> None:
    """Write an adapter's files, in one step."""
    with building(directory) as unfinished:
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        receipt = {"fingerprint": fingerprint, "sha256": hash_adapter(unfinished)}
        (unfinished / RECEIPT).write_text(json.dumps(receipt))


def ensemble_id(output: Path) -> str:
    """The ensemble's name: the one it has, or a new one.

    The same users are in an ensemble that is trained again, so what it cost them goes on under the same name.
    """
    if (output / manifests.FILE).exists():
        return Manifest.load(output).ensemble
    return uuid.uuid4().hex


def remove_others(output: Path, manifest: Manifest) -> None:
    """Adapters that no manifest names any more hold private text to no purpose."""
    named = {Path(adapter.path).name for adapter in manifest.adapters}
    for directory in (output / PARTS).iterdir():
        if directory.name not in named:
            shutil.rmtree(directory, ignore_errors=True)
