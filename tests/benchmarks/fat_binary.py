"""Removes device code of other architectures from a shared library that a CUDA compiler has made.

The section `.nv_fatbin` of such a library is a sequence of fat binaries, one for each translation unit, to which the
library has pointers. A fat binary is a header and entries, each of them machine code (an ELF file) or PTX of one
architecture. CUDA's runtime loads from a fat binary the machine code of the device's architecture, or else compiles the
newest PTX that is not newer than the device. `keep_architecture` moves the entries that it would choose from to the
front of their fat binary, whose header then states their size, and writes zeros behind them, which compress to nothing.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = ".nv_fatbin"
MAGIC = 0xBA55ED50
ALIGNMENT = 8
PTX, MACHINE_CODE = 1, 2

_HEADER = struct.Struct("<IHHQ")  # of a fat binary: magic, version, size of the header, size of the entries
_HEADER_SIZE_OF_ENTRIES = 8
_ENTRY = struct.Struct("<HHIQ")  # kind, version, size of the entry's header, size of its code
_ENTRY_ARCHITECTURE = 28
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes code of one architecture, such as 90, and has its bytes, which begin with the entry's header."""

    kind: int
    architecture: int
    content: bytes


@dataclass(frozen=True, slots=True)
class FatBinary:
    """Describes a fat binary: where its header and its entries start in the library, and where they end."""

    header: int
    start: int
    end: int
    entries: tuple[Entry, ...]


def keep_architecture(library: bytearray, architecture: int) -> int:
    """Removes, in place, all device code that a device of this architecture does not load.

    A fat binary without any such code keeps its smallest entry, which nothing loads.

    Args:
        library: a 64-bit little-endian ELF file.
        architecture: ten times the compute capability, such as 90.

    Returns:
        The number of bytes of entries that are left.

    Raises:
        ValueError: the library is no such ELF file, or has no device code.
    """
    binaries = fat_binaries(library)
    if not binaries:
        raise ValueError(f"library: has no device code in {SECTION}")
    left = 0
    for binary in binaries:
        kept = _loaded(binary.entries, architecture) or [min(binary.entries, key=lambda entry: len(entry.content))]
        content = b"".join(entry.content for entry in kept)
        library[binary.start : binary.end] = content.ljust(binary.end - binary.start, b"\0")
        struct.pack_into("<Q", library, binary.header + _HEADER_SIZE_OF_ENTRIES, len(content))
        left += len(content)
    return left


def _loaded(entries: tuple[Entry, ...], architecture: int) -> list[Entry]:
    machine_code = [entry for entry in entries if (entry.kind, entry.architecture) == (MACHINE_CODE, architecture)]
    if machine_code:
        return machine_code
    ptx = [entry for entry in entries if entry.kind == PTX and entry.architecture <= architecture]
    newest = max((entry.architecture for entry in ptx), default=0)
    return [entry for entry in ptx if entry.architecture == newest]


def fat_binaries(library: bytes | bytearray) -> list[FatBinary]:
    """Returns the fat binaries of a library, in its order."""
    found = []
    position, end = _section(library)
    while position + _HEADER.size <= end:
        magic, _, header, size = _HEADER.unpack_from(library, position)
        if magic != MAGIC:  # padding
            position += ALIGNMENT
            continue
        start = position + header
        found.append(FatBinary(position, start, start + size, tuple(_entries(library, start, start + size))))
        position = start + size
    return found


def _entries(library: bytes | bytearray, position: int, end: int) -> Iterator[Entry]:
    while position < end:
        kind, _, header, size = _ENTRY.unpack_from(library, position)
        (architecture,) = struct.unpack_from("<I", library, position + _ENTRY_ARCHITECTURE)
        yield Entry(kind, architecture, bytes(library[position : position + header + size]))
        position += header + size


def _section(library: bytes | bytearray) -> tuple[int, int]:
    """Returns the bounds of the section of fat binaries, which are equal without one."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("library: must be a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [_SECTION_HEADER.unpack_from(library, table + index * size) for index in range(count)]
    strings, wanted = headers[names][4], SECTION.encode() + b"\0"
    for name, _, _, _, start, length, *_ in headers:
        if library[strings + name : strings + name + len(wanted)] == wanted:
            return start, start + length
    return 0, 0
