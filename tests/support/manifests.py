"""Builds manifests of ensembles without files."""

from typing import Any

from privmix.training.manifest import Adapter, Manifest, Part

DIGEST = "0" * 64


def adapter(name: str) -> Adapter:
    return Adapter(name=name, path=f"parts/{name}", sha256=DIGEST)


def manifest(*parts: Part, **changes: Any) -> Manifest:
    names = {"ensemble": "e", "base_model": "m", "base_revision": DIGEST, "tokenizer": DIGEST, "salt_id": "s"}
    return Manifest(parts=parts, **{**names, "part_kind": "reader", **changes})
