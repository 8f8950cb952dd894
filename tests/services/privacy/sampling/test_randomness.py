"""Claim: every draw that a guarantee rests on comes from the operating system's generator, through one package."""

import ast
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kstest

from privmix.privacy.sampling.randomness import normal, poisson_subsample

ROOT = Path(__file__).parents[4]

SAMPLING = {"privmix/privacy/sampling/randomness.py", "privmix/privacy/sampling/noise.py"}
"""The modules that draw private randomness: the operating system's, and OpenDP's, which comes from there."""

NOT_PRIVATE = {
    "privmix/foundation/files.py": ({"secrets"}, "names of temporary files"),
    "privmix/tokenization/people_text.py": (
        {"secrets"},
        "the name of the marks in one chat, which nobody can type",
    ),
    "privmix/structure/vocabulary.py": ({"secrets"}, "names of special tokens, which no grammar contains"),
    "privmix/laboratory/audit/canaries.py": ({"secrets"}, "planted text"),
    "privmix/engine/vllm_engine.py": ({"secrets"}, "a name"),
    "privmix/laboratory/evaluation/rows.py": ({"secrets"}, "a name"),
    "privmix/laboratory/evaluation/text.py": ({"default_rng"}, "blocks of held-out text"),
    "privmix/gateway/settings.py": ({"secrets"}, "the key of the hash that separates prefix caches"),
    "privmix/laboratory/heads/attacks.py": (
        {"Generator", "default_rng", "manual_seed", "normal", "randn", "secrets"},
        "coins and releases of an audit",
    ),
    "privmix/laboratory/heads/head.py": ({"secrets"}, "the seed of a training, whose noise is drawn elsewhere"),
    "privmix/laboratory/heads/certified.py": (
        {"Generator", "manual_seed", "randn"},
        "candidates, which need not be secret; `select` draws from them",
    ),
    "privmix/laboratory/heads/table.py": ({"default_rng"}, "the rows of a comparison"),
    "privmix/laboratory/heads/expm_nf.py": (
        {"Generator", "manual_seed", "randn", "randperm"},
        "a method without a guarantee",
    ),
    "privmix/laboratory/heads/flows.py": ({"randn"}, "initial weights, and a method without a guarantee"),
    "privmix/laboratory/heads/methods.py": ({"manual_seed"}, "initial weights"),
    "privmix/laboratory/heads/models.py": ({"rand"}, "initial weights"),
    "privmix/laboratory/heads/row_function.py": (
        {"Generator", "manual_seed", "rand", "randperm"},
        "numbers on which places of a batch are compared",
    ),
    "privmix/laboratory/heads/sgd.py": ({"manual_seed", "randperm"}, "training without privacy"),
    "privmix/laboratory/reproduce/quantities.py": ({"manual_seed"}, "initial weights of a flow over public rows"),
    "privmix/keys/records.py": ({"secrets"}, "API keys"),
    "privmix/training/adapter.py": (
        {"Generator", "manual_seed", "randperm"},
        "initial weights and the order of one part's blocks",
    ),
    "privmix/training/demo.py": ({"randint", "random"}, "a generated corpus"),
    "privmix/shards/line.py": ({"token_bytes"}, "the secret and the nonces of connections"),
    "privmix/training/partition.py": ({"secrets"}, "a key, which is drawn once"),
    "privmix/training/per_unit.py": ({"manual_seed"}, "initial weights"),
    "privmix/training/row_gradients.py": (
        {"Generator", "manual_seed", "randint", "randn"},
        "tokens and weights on which places of a pass are compared",
    ),
}
"""The other modules that draw at random: with what, and for what. No guarantee rests on these draws."""

MODULES = {"random", "secrets", "opendp", "torch.random", "numpy.random"}
DRAWS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
    "multinomial",
    "bernoulli",
    "poisson",
    "default_rng",
    "RandomState",
    "manual_seed",
    "Generator",
    "Gumbel",
    "Laplace",
    "normal_",
    "uniform_",
    "exponential_",
    "random_",
    "log_normal_",
    "urandom",
    "getrandom",
    "rvs",
    "DPOptimizer",
    "PrivacyEngine",
}
"""Functions of PyTorch, NumPy, SciPy, Opacus and the operating system that draw, by their last name."""


def drawn_in(source: str) -> set[str]:
    """Returns the names of the modules and functions in a source that draw at random."""
    own: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names if {alias.name, alias.name.split(".")[0]} & MODULES}
            case ast.ImportFrom(module=str(module)) if module.startswith("privmix.privacy.sampling"):
                own |= {alias.asname or alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                whole = module.split(".")[0] in MODULES or module in MODULES
                names |= {alias.name for alias in node.names if whole or alias.name in DRAWS}
            case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)) if name in DRAWS:
                names.add(name)
            case ast.ClassDef():
                names -= {base.id for base in node.bases if isinstance(base, ast.Name)}
    return names - own


def modules() -> Iterator[tuple[str, str]]:
    for root in (ROOT / "services", ROOT / "cluster"):
        for file in sorted(root.glob("privmix*/**/*.py")):
            yield str(file.relative_to(root)), file.read_text()


def test_only_one_package_draws_private_randomness() -> None:
    drawn = {name: names for name, source in modules() if (names := drawn_in(source)) and name not in SAMPLING}
    known = {name: names for name, (names, _) in NOT_PRIVATE.items()}
    assert drawn == known, "draw through privmix/privacy/sampling/randomness.py"


@pytest.mark.parametrize(
    "source",
    [
        "import secrets",
        "from random import Random",
        "import numpy.random",
        "import torch\nnoise = torch.randn(3)",
        "import torch\nweight = torch.empty(3).normal_()",
        "import numpy as np\nrng = np.random.default_rng()",
        "import os\nword = os.urandom(8)",
        "from opacus.optimizers import DPOptimizer\nDPOptimizer(None)",
        "from opendp.measurements import make_laplace",
    ],
)
def test_a_planted_draw_is_found(source: str) -> None:
    assert drawn_in(source)


@pytest.mark.parametrize("q", [0.0, 0.03, 0.5, 1.0])
def test_every_part_is_drawn_with_probability_q(q: float) -> None:
    parts, draws = 64, 4000
    counts = [0] * parts
    pairs = 0
    for _ in range(draws):
        drawn = poisson_subsample(parts, q)
        assert list(drawn) == sorted(set(drawn))
        for part in drawn:
            counts[part] += 1
        pairs += sum(1 for part in drawn if part % 2 == 0 and part + 1 in drawn)
    # Seven standard deviations: chance fails any of these less than once in 10**9 runs.
    spread = 7 * math.sqrt(draws * q * (1 - q))
    assert all(abs(count - draws * q) <= spread for count in counts)
    neighbours = draws * parts / 2
    assert abs(pairs - neighbours * q * q) <= 7 * math.sqrt(neighbours * q * q * (1 - q * q))


def test_a_part_is_drawn_below_the_threshold_and_not_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threshold = int(0.3 * 2**64)
    words = np.array([threshold - 1, threshold, 0, 2**64 - 1], dtype=np.uint64).tobytes()
    monkeypatch.setattr(os, "urandom", lambda size: words[:size])
    assert poisson_subsample(4, 0.3) == (0, 2)


def test_normal_numbers_are_normal_and_independent_within_a_draw_and_between_draws() -> None:
    """Each bound is at six standard deviations or more: chance fails one less than once in 10**8 runs."""
    count = 100_000
    draws = np.stack([normal(count), normal(count)])
    assert len(np.unique(draws)) == draws.size
    for drawn in draws:
        assert kstest(drawn, "norm").pvalue > 1e-9
    assert abs(float(normal(10**6).var()) - 1) < 6 * math.sqrt(2 / 10**6)
    first, second = draws[:, : count // 2], draws[:, count // 2 :]  # made of the same radii
    pairs = {"between draws": (draws[0], draws[1]), "halves": (first, second), "next": (draws[:, 1:], draws[:, :-1])}
    for name, (one, other) in pairs.items():
        for power in (1, 2):
            related = np.corrcoef(one.ravel() ** power, other.ravel() ** power)[0, 1]
            assert abs(related) < 6 / math.sqrt(one.size), (name, power)
    assert [len(normal(odd)) for odd in (0, 1, 3)] == [0, 1, 3]


@pytest.mark.parametrize(("parts", "q"), [(-1, 0.5), (3, -0.1), (3, 1.1), (3, math.nan)])
def test_impossible_draws_are_refused(parts: int, q: float) -> None:
    with pytest.raises(ValueError, match=r"parts must|q must"):
        poisson_subsample(parts, q)
