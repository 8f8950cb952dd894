"""Strong adapters, real text, and both kinds of operators."""

from pathlib import Path

import pytest

from privmix.foundation import compiled
from tests.ensembles import write_adapters

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. 'My dear Mr. Bennet,' said his lady to him one day, 'have you heard that "
    "Netherfield Park is let at last?'"
)


@pytest.fixture(scope="session")
def tokens(public_model: Path) -> tuple[int, ...]:
    from transformers import AutoTokenizer  # takes a second, which most tests do not need

    return tuple(AutoTokenizer.from_pretrained(public_model)(TEXT).input_ids)


@pytest.fixture(scope="session")
def adapters(public_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_adapters(tmp_path_factory.mktemp("adapters"), ("first", "second", "third"), public_model)


@pytest.fixture(params=["compiled", "torch"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects the operators of a machine with a C++ compiler, and of one without."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "operators", lambda _: None)
    name: str = request.param
    return name
