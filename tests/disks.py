"""Mounts small disks in memory that tests fill. Needs root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def unavailable() -> str | None:
    """Returns the reason why this machine cannot run such tests, or None."""
    if os.geteuid() != 0:
        return "to mount a disk needs root"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "mounts are not allowed here"
    return None


class Disk:
    """A disk at `path`, mounted by `mounted`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fills the disk. Raises OSError in the block to anyone who writes more."""
        filler = self.path / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                size = 1 << 20
                while size:
                    try:
                        file.write(b"\0" * size)
                    except OSError:
                        size //= 2
            yield
        finally:
            filler.unlink(missing_ok=True)


@contextmanager
def mounted(path: Path, megabytes: int) -> Iterator[Disk]:
    """Mounts a disk of a size on an existing directory until the end of the context."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=777", "tmpfs", path], check=True)
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
