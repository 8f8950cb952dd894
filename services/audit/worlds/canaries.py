"""Plants secrets in a corpus, so that what an attacker learns of them comes from it alone (Carlini et al. 2019)."""

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from services.files import write_lines
from services.training import demo

CORPUS = "planted.jsonl"
PLANTED = "planted-canaries.jsonl"


@dataclass(frozen=True)
class Canary:
    """A planted user with a secret.

    Attributes:
        user: the user's id.
        prompt: what the attacker asks with: the user's text up to the secret.
        secret: the digits that follow it.
        included: whether the user's text is in the corpus; a fair coin decides.
    """

    user: str
    prompt: str
    secret: str
    included: bool

    @property
    def text(self) -> str:
        """What is planted."""
        return f"{self.prompt}{self.secret}."


def plant(directory: Path, *, users: int, planted: int, repetitions: int, seed: int = 0) -> tuple[Canary, ...]:
    """A copy of the demo corpus with more people in it, each included by a fair coin; or the one that is there.

    Args:
        directory: where `planted.jsonl` and `planted-canaries.jsonl` go.
        users: people of the demo corpus besides.
        planted: people with a secret; each that is included says it ``repetitions`` times.
        seed: of the demo corpus. The coins are the operating system's, as one-run auditing needs them to be fair.
    """
    if not (directory / PLANTED).exists():
        demo.write_demo_corpus(directory, users=users + planted, held_out=planted, seed=seed)
        people = [person for person in _lines(directory / demo.CANARIES) if person["split"] == Path(demo.HELD_OUT).stem]
        canaries = [_canary(person) for person in people]
        documents = [{"user": one.user, "text": one.text} for one in canaries if one.included] * repetitions
        everything = [*_lines(directory / demo.TRAIN), *documents]
        secrets.SystemRandom().shuffle(everything)
        write_lines(directory / CORPUS, everything)
        write_lines(directory / PLANTED, [asdict(one) for one in canaries])
    return read(directory)


def read(directory: Path) -> tuple[Canary, ...]:
    """Reads the canaries that were planted in ``directory``."""
    return tuple(
        Canary(line["user"], line["prompt"], line["secret"], bool(line["included"]))
        for line in _lines(directory / PLANTED)
    )


def candidates(canary: Canary, count: int) -> list[str]:
    """Returns ``count`` random secrets, the true one first."""
    others: dict[str, None] = {canary.secret: None}
    while len(others) < count:
        others["".join(secrets.choice("0123456789") for _ in canary.secret)] = None
    return list(others)


def _canary(person: dict[str, str]) -> Canary:
    letters, digits = person["code"].split("-")
    return Canary(person["user"], f"{person['prompt']} {letters}-", digits, secrets.choice((True, False)))


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
