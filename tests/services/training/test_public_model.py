"""Claim: a public model is a complete directory of a language model; other input gets a clear error."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from privmix.foundation.errors import PublicModelError
from privmix.training import public_model


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    """A copy of the public model with linked weights, so that a test can change the small files."""
    directory = tmp_path / "model"
    shutil.copytree(base, directory, copy_function=os.link)
    return directory


def set_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(config))


def test_a_directory_resolves_to_itself(copy: Path) -> None:
    assert public_model.resolve(str(copy)) == copy


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "a/b/c"])
def test_missing_directory(name: str) -> None:
    with pytest.raises(PublicModelError, match="no such directory"):
        public_model.resolve(name)


def test_file_instead_of_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(PublicModelError, match="is a file"):
        public_model.resolve(str(file))


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(PublicModelError, match=r"no config\.json"):
        public_model.resolve(str(tmp_path))


def test_model_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(PublicModelError, match="no weights"):
        public_model.resolve(str(copy))


def cut(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").unlink()  # it is a link
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])


def pointer(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
    )


def shards(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def empty(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").touch()


def packed(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    save_file({"model.layers.0.q_proj.qweight": np.zeros(2, np.int32)}, directory / "model.safetensors")


def empty_index(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def no_index(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text("[]")


def arguments_alone(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "training_args.bin").write_bytes(b"\x80\x04x")


def cut_bin(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"PK\x03\x04 archive/data.pkl")


def adapter(directory: Path) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x", "peft_type": "LORA"}))


def quantised(directory: Path) -> None:
    set_config(directory, quantization_config={"quant_method": "gptq", "bits": 4})


def template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")


def own_code(directory: Path) -> None:
    set_config(directory, model_type="x_custom", auto_map={"AutoConfig": "configuration_x.XC"})


DAMAGES: dict[Callable[[Path], None], str] = {
    cut: r"model\.safetensors: is damaged or cut; download it again",
    pointer: r"model\.safetensors: is a pointer of Git LFS .*run `git lfs pull`",
    shards: r"model-2\.safetensors: cannot be read \(No such file",
    empty: r"model\.safetensors: is damaged or cut",
    packed: r"model\.safetensors: holds quantised weights",
    empty_index: r"model\.safetensors\.index\.json: is not an index",
    no_index: r"model\.safetensors\.index\.json: is not an index",
    arguments_alone: "has no weights",
    cut_bin: r"pytorch_model\.bin: is damaged or cut",
    adapter: r"holds an adapter .*move adapter_config\.json",
    quantised: r"are quantised \(config\.json, quantization_config: gptq\)",
    template: r"its chat template is damaged \(line 1: .*copy chat_template\.jinja",
    own_code: r"brings its own code \(config\.json, auto_map\)",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_weights_that_cannot_be_loaded_are_named_with_the_fix(copy: Path, damage: Callable[[Path], None]) -> None:
    damage(copy)
    with pytest.raises(PublicModelError, match=DAMAGES[damage]):
        public_model.resolve(str(copy))


def test_model_without_tokenizer(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(PublicModelError, match="tokenizer"):
        public_model.resolve(str(copy))


def test_tokenizer_of_a_larger_model(copy: Path) -> None:
    set_config(copy, vocab_size=32000)
    with pytest.raises(PublicModelError, match="49151, its embeddings only 32000 rows"):
        public_model.resolve(str(copy))


def test_a_tokenizer_with_random_merges(copy: Path) -> None:
    path = copy / "tokenizer.json"
    described = json.loads(path.read_bytes())
    described["model"]["dropout"] = 0.1
    path.unlink()  # it is a link
    path.write_text(json.dumps(described))
    with pytest.raises(PublicModelError, match=r"tokenizer\.json, model\.dropout: makes tokens random"):
        public_model.resolve(str(copy))


def test_model_that_is_not_a_language_model(copy: Path) -> None:
    set_config(copy, model_type="vit")
    with pytest.raises(PublicModelError, match="vit is not a causal language model"):
        public_model.resolve(str(copy))


def test_unknown_kind_of_model(copy: Path) -> None:
    set_config(copy, model_type="no-such-kind")
    with pytest.raises(PublicModelError, match=r"config\.json"):
        public_model.resolve(str(copy))


@pytest.mark.parametrize(
    ("unreachable", "named"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the network"),
        ({"HF_ENDPOINT": "http://hub.example", "ALL_PROXY": "http://127.0.0.1:9"}, "the proxy of ALL_PROXY"),
    ],
)
def test_hub_id_without_network(unreachable: dict[str, str], named: str, tmp_path: Path) -> None:
    # The client reads the hub's address at import, so the test needs another process.
    code = (
        "from privmix.foundation.errors import PublicModelError\n"
        "from privmix.training import public_model\n"
        "try:\n    public_model.resolve('someone/some-model')\n"
        "except PublicModelError as error:\n    print(error)\n"
    )
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment = kept | unreachable | {"HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "model someone/some-model" in result.stdout
    assert named in result.stdout


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
