"""Claim: a manifest survives storage, names bad fields, and detects changed or missing adapters."""

import json
from pathlib import Path

import pytest

from privmix.engine.adapter_config import ADAPTER_FILES
from privmix.foundation.errors import ManifestError
from privmix.training.manifest import FILE, Adapter, Manifest, Part
from tests.support.manifests import DIGEST, manifest
from tests.support.training import Ensemble


def part(index: int, **changes: object) -> Part:
    fields = {"index": index, "name": f"part-{index}", "path": f"parts/{index}", "sha256": DIGEST}
    return Part.model_validate(fields | changes)


def halves(index: int) -> tuple[Adapter, Adapter]:
    first, second = (Adapter(name=f"part-{index}{half}", path=f"parts/{index}{half}", sha256=DIGEST) for half in "ab")
    return first, second


@pytest.mark.parametrize("parts", [(part(0), part(1)), (part(0, halves=halves(0)), part(1, halves=halves(1)))])
def test_round_trip(tmp_path: Path, parts: tuple[Part, ...]) -> None:
    written = manifest(*parts)
    written.save(tmp_path)
    assert Manifest.load(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_missing_or_truncated_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"has no manifest\.json"):
        Manifest.load(tmp_path)
    (tmp_path / FILE).write_text(manifest(part(0)).model_dump_json()[:50])
    with pytest.raises(ManifestError, match=FILE):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format_version": 3}, "format_version"),
        ({"base_revision": "short"}, "base_revision"),
        ({"part_kind": "shared"}, "part_kind"),
        ({"parts": []}, "parts"),
        ({"surprise": 1}, "surprise"),
        ({"salt_id": None}, "salt_id"),
    ],
)
def test_bad_field_is_named(tmp_path: Path, changes: dict[str, object], field: str) -> None:
    content = json.loads(manifest(part(0)).model_dump_json()) | changes
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ManifestError, match=field):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([part(0), part(2)], "none missing"),
        ([part(1), part(0)], "in order"),
        ([part(0), part(1, name="part-0")], "the same name"),
        ([part(0), part(1, path="parts/0")], "the same path"),
        ([part(0, path="../elsewhere")], "leaves the ensemble's directory"),
        ([part(0, path="/elsewhere")], "leaves the ensemble's directory"),
        ([part(0, halves=halves(0)), part(1)], "all must, or none"),
        ([part(0, halves=halves(0)), part(1, halves=halves(0))], "the same name"),
        ([part(0, halves=halves(0)), part(1, halves=halves(1), path="parts/0b")], "the same path"),
        ([part(0, halves=[halves(0)[0].model_copy(update={"path": "../0a"}), halves(0)[1]])], "leaves the ensemble's"),
    ],
)
def test_impossible_parts(parts: list[Part], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        manifest(*parts)


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_a_changed_or_missing_adapter_is_refused(ensemble: Ensemble, tmp_path: Path, name: str) -> None:
    directory = ensemble.copy(tmp_path / "copy")
    loaded = Manifest.load(directory)
    file = directory / loaded.parts[1].path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ManifestError, match=r"part-001: its adapter .* is not the one"):
        loaded.verify(directory)
    file.unlink()
    with pytest.raises(ManifestError, match=r"part-001: its adapter .* is missing"):
        loaded.verify(directory)


@pytest.mark.parametrize("field", ["base_revision", "tokenizer"])
def test_another_base_is_refused(ensemble: Ensemble, field: str) -> None:
    other = Manifest.load(ensemble.directory).model_copy(update={field: DIGEST})
    with pytest.raises(ManifestError, match=field):
        other.verify(ensemble.directory)
