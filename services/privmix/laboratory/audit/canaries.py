"""Plants random secrets in a corpus, so that an attacker can learn them only from it (Carlini et al. 2019)."""

import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from privmix.foundation.json_lines import load_lines, write_lines
from privmix.training import demo

CORPUS = "planted.jsonl"
PLANTED = "planted-canaries.jsonl"


@dataclass(frozen=True)
class Canary:
    """A planted user with a secret.

    Attributes:
        user: the user's id.
        prompt: the attacker's prompt: the user's text up to the secret.
        secret: the digits that follow the prompt.
        included: whether the user's text is in the corpus; a fair coin decides.
    """

    user: str
    prompt: str
    secret: str
    included: bool

    @property
    def text(self) -> str:
        """The planted text."""
        return f"{self.prompt}{self.secret}."


def plant(directory: Path, *, users: int, planted: int, repetitions: int, digits: int = 6) -> tuple[Canary, ...]:
    """Writes a copy of the demo corpus with planted users, each included by a fair coin. Keeps an existing one.

    Args:
        directory: the directory for `planted.jsonl` and `planted-canaries.jsonl`.
        users: the number of ordinary users of the demo corpus.
        planted: the number of users with a secret.
        repetitions: the number of copies of an included user's text.
        digits: the length of a secret, at most 6.
    """
    if not (directory / PLANTED).exists():
        demo.write_demo_corpus(directory, users=users + planted, held_out=planted, seed=0)
        people = [
            person for person in load_lines(directory / demo.CANARIES) if person["split"] == Path(demo.HELD_OUT).stem
        ]
        canaries = [_canary(person, digits) for person in people]
        included = [{"user": canary.user, "text": canary.text} for canary in canaries if canary.included]
        documents = [*load_lines(directory / demo.TRAIN), *included * repetitions]
        secrets.SystemRandom().shuffle(documents)
        write_lines(directory / CORPUS, documents, private=True)
        write_lines(directory / PLANTED, [asdict(canary) for canary in canaries], private=True)
    return read(directory)


def read(directory: Path) -> tuple[Canary, ...]:
    """Reads the planted canaries of ``directory``."""
    return tuple(Canary(**line) for line in load_lines(directory / PLANTED))


def _canary(person: dict[str, str], length: int) -> Canary:
    """Returns a planted user. The coin comes from the operating system, because one-run audits need fair ones."""
    user, prompt, included = person["user"], person["prompt"], secrets.choice((True, False))
    letters, digits = person["code"].split("-")
    return Canary(user, f"{prompt} {letters}-", digits[:length], included)
