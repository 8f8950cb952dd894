"""Claim: a public model is a complete directory of a language model; other input gets a clear error."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from privmix.foundation.errors import PublicModelError
from privmix.training import public_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    """A copy of the public model of linked files: a test must remove a file before it writes it."""
    directory = tmp_path / "model"
    shutil.copytree(base, directory, copy_function=os.symlink)
    return directory


def set_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "a/b/c"])
def test_missing_directory(name: str) -> None:
    with pytest.raises(PublicModelError, match="no such directory"):
        public_model.resolve(name)


def test_other_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for place, problem in ((tmp_path / "model.gguf", "is a file"), (tmp_path, r"no config\.json")):
        with pytest.raises(PublicModelError, match=problem):
            public_model.resolve(str(place))


def replacing(name: str, content: bytes | None = None) -> Callable[[Path], None]:
    """Returns a function that removes the weights of a model and writes another file."""

    def damage(directory: Path) -> None:
        (directory / WEIGHTS).unlink()
        if content is not None:
            (directory / name).write_bytes(content)

    return damage


def cut(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    replacing(WEIGHTS, content[: len(content) // 2])(directory)


def shards(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / INDEX).write_text(json.dumps(index))


def packed(directory: Path) -> None:
    replacing(WEIGHTS)(directory)
    save_file({"model.layers.0.q_proj.qweight": np.zeros(2, np.int32)}, directory / WEIGHTS)


def adapter(directory: Path) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x", "peft_type": "LORA"}))


def template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")


def no_tokenizer(directory: Path) -> None:
    for file in directory.glob("tokenizer*"):
        file.unlink()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
GPTQ = {"quant_method": "gptq", "bits": 4}
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (replacing(WEIGHTS), "no weights"),
    "cut": (cut, r"model\.safetensors: is damaged or cut; download it again"),
    "a pointer": (replacing(WEIGHTS, POINTER), r"model\.safetensors: is a pointer of Git LFS .*run `git lfs pull`"),
    "shards": (shards, r"model-2\.safetensors: cannot be read \(No such file"),
    "packed": (packed, r"model\.safetensors: holds quantised weights"),
    "empty index": (replacing(INDEX, b'{"weight_map": {}}'), r"index\.json: is not an index"),
    "no index": (replacing(INDEX, b"[]"), r"index\.json: is not an index"),
    "arguments alone": (replacing("training_args.bin", b"\x80\x04x"), "has no weights"),
    "cut bin": (replacing("pytorch_model.bin", b"PK\x03\x04 data.pkl"), r"pytorch_model\.bin: is damaged or cut"),
    "adapter": (adapter, r"holds an adapter .*move adapter_config\.json"),
    "quantised": (partial(set_config, quantization_config=GPTQ), r"quantised \(config\.json, .*: gptq\)"),
    "template": (template, r"its chat template is damaged \(line 1: .*copy chat_template\.jinja"),
    "own code": (
        partial(set_config, model_type="x", auto_map={"AutoConfig": "x.X"}),
        r"brings its own code .*auto_map",
    ),
    "no tokenizer": (no_tokenizer, "tokenizer"),
    "another tokenizer": (partial(set_config, vocab_size=32000), "49151, its embeddings only 32000 rows"),
    "no language model": (partial(set_config, model_type="vit"), "vit is not a causal language model"),
    "unknown kind": (partial(set_config, model_type="no-such-kind"), r"config\.json"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_cannot_be_loaded_is_named_with_the_fix(copy: Path, kind: str) -> None:
    damage, problem = DAMAGES[kind]
    damage(copy)
    with pytest.raises(PublicModelError, match=problem):
        public_model.resolve(str(copy))


def test_hub_id_without_network(tmp_path: Path) -> None:
    # The client reads the hub's address at import, so the test needs another process.
    code = (
        "from privmix.foundation.errors import PublicModelError\n"
        "from privmix.training import public_model\n"
        "try:\n    public_model.resolve('someone/some-model')\n"
        "except PublicModelError as error:\n    print(error)\n"
    )
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    unreachable = {"HF_ENDPOINT": "http://hub.example", "ALL_PROXY": "http://127.0.0.1:9"}
    environment = kept | unreachable | {"HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "model someone/some-model" in result.stdout
    assert "the proxy of ALL_PROXY" in result.stdout


def test_revision_follows_weights_and_configuration_alone(copy: Path, base: Path) -> None:
    original = public_model.revision(base)
    set_config(copy, transformers_version="0.0.0")
    assert public_model.revision(copy) == original
    set_config(copy, rms_norm_eps=1e-3)
    assert public_model.revision(copy) != original


def test_tokenizer_hash_follows_its_files(copy: Path, base: Path) -> None:
    assert public_model.tokenizer_hash(copy) == public_model.tokenizer_hash(base)
    tokenizer = copy / "tokenizer.json"
    content = tokenizer.read_text()
    tokenizer.unlink()
    tokenizer.write_text(content + " ")
    assert public_model.tokenizer_hash(copy) != public_model.tokenizer_hash(base)
