"""Claim: what is packed for a GPU has the code that the GPU loads and no other, and versions are the locked ones."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.fat_binary import MACHINE_CODE, MAGIC, PTX, fat_binaries, keep_architecture
from tests.benchmarks.pack import LACKING, LOCK, NO_OPENDP, hopper_names, locked_versions

CODE = [(MACHINE_CODE, 80, b"a" * 16), (PTX, 80, b"b" * 8), (PTX, 90, b"c" * 24), (MACHINE_CODE, 90, b"d" * 32)]
ONLY_PTX = [(MACHINE_CODE, 80, b"e" * 8), (PTX, 75, b"f" * 8), (PTX, 80, b"g" * 16), (PTX, 100, b"h" * 8)]
OTHERS = [(MACHINE_CODE, 100, b"i" * 32), (MACHINE_CODE, 120, b"j" * 16)]


def fat_binary(entries: list[tuple[int, int, bytes]]) -> bytes:
    body = b"".join(
        struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12) + struct.pack("<I", architecture) + bytes(32) + code
        for kind, architecture, code in entries
    )
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


def library(*binaries: bytes) -> bytearray:
    """Returns an ELF file with a section of names and one of these fat binaries, with padding between them."""
    names = b"\0.shstrtab\0.nv_fatbin\0"
    code = bytes(8).join(binaries)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, 64 + len(names) + len(code))
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 1)
    sections = ((0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(code)))
    table = (struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, start, size, 0, 0, 1, 0) for name, start, size in sections)
    return bytearray(bytes(header) + names + code + b"".join(table))


def codes(packed: bytearray) -> list[list[bytes]]:
    return [[entry.content[64:] for entry in binary.entries] for binary in fat_binaries(packed)]


def test_a_library_keeps_the_code_that_a_device_loads() -> None:
    """Its machine code; or else the newest PTX that is not newer; or else the smallest entry, which nothing loads."""
    packed = library(fat_binary(CODE), fat_binary(ONLY_PTX), fat_binary(OTHERS))
    before = bytes(packed)
    left = keep_architecture(packed, 90)
    assert codes(packed) == [[b"d" * 32], [b"g" * 16], [b"j" * 16]]
    assert left == 3 * 64 + 64
    assert len(packed) == len(before)
    starts = [binary.header for binary in fat_binaries(packed)]
    assert starts == [binary.header for binary in fat_binaries(before)]  # the library points to them
    assert b"a" * 16 not in packed


def test_a_file_without_device_code_is_refused() -> None:
    with pytest.raises(ValueError, match="no device code"):
        keep_architecture(library(), 90)
    with pytest.raises(ValueError, match="ELF"):
        keep_architecture(bytearray(b"MZ" + bytes(100)), 90)


def test_every_package_has_a_locked_version() -> None:
    versions = locked_versions(LOCK)
    assert set(LACKING) - set(versions) == set()
    assert "vllm" in versions


def test_libraries_of_other_devices_stay_behind() -> None:
    names = [
        "vllm/__init__.py",
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/third_party/deep_gemm/__init__.py",
        "vllm/vllm-rs",
        "vllm-0.32.0.dist-info/METADATA",
    ]
    assert list(hopper_names(names)) == [names[0], names[1], names[5]]


def test_the_package_in_the_place_of_opendp_draws_no_noise(tmp_path: Path) -> None:
    for name, text in NO_OPENDP.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    program = (
        "from opendp.measurements import make_gaussian\nfrom opendp.mod import enable_features\n"
        "enable_features('contrib')\nmake_gaussian(1, scale=2.0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert "no noise can be drawn" in done.stderr.splitlines()[-1]
