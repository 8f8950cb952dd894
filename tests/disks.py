"""Mounts small disks in memory that tests fill and make read-only, and clocks that tests move. Needs root and gcc."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 30.0

_SHIFTED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    char text[32] = {0};
    int file = open(getenv("CLOCK_SHIFT_FILE"), O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    return size > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


def unavailable() -> str | None:
    """Returns the reason why this machine cannot run such tests, or None."""
    if os.geteuid() != 0:
        return "to mount a disk needs root"
    if shutil.which("gcc") is None:
        return "to move a clock needs gcc"
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
    def read_only(self) -> Iterator[None]:
        """Makes the disk read-only, once no process has a file open for writing."""
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(["mount", "-o", "remount,ro", self.path], capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"files on {self.path} stay open for writing")
            time.sleep(0.001)
        try:
            yield
        finally:
            subprocess.run(["mount", "-o", "remount,rw", self.path], check=True)


@contextmanager
def mounted(path: Path, megabytes: int) -> Iterator[Disk]:
    """Mounts a disk of a size on an existing directory until the end of the context."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=777", "tmpfs", path], check=True)
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


class Clock:
    """The clock of the processes that start with `environment`. All users may read its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock", folder / "clock.so"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", library, "-ldl"],
            input=_SHIFTED.encode(),
            check=True,
        )
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "CLOCK_SHIFT_FILE": str(self._file)}
        self.move(0)

    def move(self, seconds: int) -> None:
        """Sets the clock to this many seconds after the time of the machine, or before it."""
        partial = self._file.with_suffix(".new")
        partial.write_text(str(seconds))
        partial.chmod(0o644)
        partial.replace(self._file)
