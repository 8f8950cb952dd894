"""Plants random secrets in a corpus, so that an attacker can learn them only from it (Carlini et al. 2019)."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import load_lines, write_lines
from privmix.training import demo

CORPUS = "planted.jsonl"
PLANTED = "planted-canaries.jsonl"
SAMPLED_TOKENS = 8
"""The number of tokens of a sampled secret."""
_OTHERS = 63

Sampler = Callable[[str, int], Sequence[str]]
"""Returns as many different texts of `SAMPLED_TOKENS` tokens as are asked for, which a model samples after a prompt."""


@dataclass(frozen=True)
class Canary:
    """A planted user with a secret.

    Attributes:
        user: the user's id.
        prompt: the attacker's prompt: the user's text up to the secret.
        secret: what follows the prompt: digits, or a sampled text.
        included: whether the user's text is in the corpus; a fair coin decides.
        others: texts from the distribution of a sampled secret; empty for digits.
    """

    user: str
    prompt: str
    secret: str
    included: bool
    others: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The planted text."""
        return f"{self.prompt}{self.secret}."

    @property
    def length(self) -> int:
        """The number of tokens of the secret. A digit is one token."""
        return SAMPLED_TOKENS if self.others else len(self.secret)


def plant(
    directory: Path, *, users: int, planted: int, repetitions: int, sampler: Sampler | None = None
) -> tuple[Canary, ...]:
    """Writes a copy of the demo corpus with planted users, each included by a fair coin. Keeps an existing one.

    Args:
        directory: the directory for `planted.jsonl` and `planted-canaries.jsonl`.
        users: the number of ordinary users of the demo corpus.
        planted: the number of users with a secret.
        repetitions: the number of copies of an included user's text.
        sampler: draws the secrets; by default they are digits.
    """
    if not (directory / PLANTED).exists():
        demo.write_demo_corpus(directory, users=users + planted, held_out=planted, seed=0)
        people = [
            person for person in load_lines(directory / demo.CANARIES) if person["split"] == Path(demo.HELD_OUT).stem
        ]
        canaries = [_canary(person, sampler) for person in people]
        included = [{"user": canary.user, "text": canary.text} for canary in canaries if canary.included]
        documents = [*load_lines(directory / demo.TRAIN), *included * repetitions]
        secrets.SystemRandom().shuffle(documents)
        write_lines(directory / CORPUS, documents, private=True)
        write_lines(directory / PLANTED, [asdict(canary) for canary in canaries], private=True)
    return read(directory)


def read(directory: Path) -> tuple[Canary, ...]:
    """Reads the planted canaries of ``directory``."""
    return tuple(
        Canary(line["user"], line["prompt"], line["secret"], bool(line["included"]), tuple(line["others"]))
        for line in load_lines(directory / PLANTED)
    )


def candidates(canary: Canary, count: int) -> list[str]:
    """Returns ``count`` different secrets from one distribution, the true one first.

    Raises:
        InputError: there are fewer others of a sampled secret.
    """
    if canary.others:
        if count > 1 + len(canary.others):
            raise InputError(f"candidates: a sampled secret has at most {1 + len(canary.others)}, not {count}")
        return [canary.secret, *canary.others[: count - 1]]
    distinct: dict[str, None] = {canary.secret: None}
    while len(distinct) < count:
        distinct["".join(secrets.choice("0123456789") for _ in canary.secret)] = None
    return list(distinct)


def _canary(person: dict[str, str], sampler: Sampler | None) -> Canary:
    """Returns a planted user. The coin comes from the operating system, because one-run audits need fair ones."""
    user, prompt, included = person["user"], person["prompt"], secrets.choice((True, False))
    if sampler is not None:
        secret, *others = sampler(prompt, 1 + _OTHERS)
        return Canary(user, prompt, secret, included, tuple(others))
    letters, digits = person["code"].split("-")
    return Canary(user, f"{prompt} {letters}-", digits, included)
