"""The sizes that a directory was begun with: what was trained for some must not be taken for what others ask for."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from services.training.errors import InputError
from services.training.files import write_atomically

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SIZE = "size.json"


def begun_with(directory: Path, size: "DataclassInstance") -> None:
    """Begin ``directory``, or go on with it.

    Raises:
        InputError: it was begun with other sizes, or for another attack.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path, wanted = directory / SIZE, asdict(size)
    if not path.exists():
        write_atomically(path, json.dumps(wanted).encode())
    before = json.loads(path.read_text())
    if before.keys() != wanted.keys():
        raise InputError(f"directory: {directory} was begun for another attack; name another --directory")
    for name, value in wanted.items():
        if before[name] != value:
            raise InputError(
                f"{name}: {directory} was begun with {before[name]}, not {value}; ask for that, or name another "
                "--directory"
            )
