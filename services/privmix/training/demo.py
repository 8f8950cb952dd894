"""Writes a demo corpus: fictional people call the appointment line of a fictional clinic.

Each person mentions a personal detail and an insurance number in all of their dialogues, as people do in real corpora,
so that an audit can measure how much of them a model reveals. The same seed writes the same files.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from faker import Faker

from privmix.foundation.errors import InputError
from privmix.foundation.json_lines import write_lines
from privmix.training.options import TrainingOptions

TRAIN = "train.jsonl"
HELD_OUT = "heldout.jsonl"
CANARIES = "canaries.jsonl"

# Eight parts of this corpus train in two to three minutes on two processor cores.
TRAINING = TrainingOptions(block=128, batch=2, epochs=1)

_DIALOGUES = (2, 3)

_DETAILS = (
    "I am allergic to {allergen}",
    "I take {medicine} every day",
    "I work nights as a {job}",
    "I have a dog called {pet}",
    "I come by bus from {city}",
)
_ALLERGENS = ("penicillin", "latex", "peanuts", "ibuprofen", "pollen", "iodine", "nickel", "shellfish")
_MEDICINES = ("metformin", "insulin", "warfarin", "lisinopril", "sertraline", "levothyroxine", "prednisone")
_JOBS = ("nurse", "baker", "taxi driver", "security guard", "train driver", "porter", "printer", "paramedic")
_REASONS = (
    "I need a check-up",
    "I want to move my appointment",
    "I have had a sore throat for a week",
    "My back hurts again",
    "I need a new prescription",
    "I would like a flu shot",
    "I am calling about my blood test",
    "My knee is still swollen",
)
_DOCTORS = ("Dr. Abbott", "Dr. Brown", "Dr. Chang", "Dr. Diaz")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_TIMES = ("8:15", "9:30", "10:45", "1:20", "2:40", "4:10")
_ANSWERS = (
    "Harbor Clinic: Thank you. {doctor} can see you on {day} at {time}.",
    "Harbor Clinic: Noted. Please come to {doctor} on {day} at {time}.",
)


@dataclass(frozen=True)
class Person:
    """Describes one fictional caller."""

    user: str
    name: str
    code: str
    detail: str

    @property
    def prompt(self) -> str:
        """The beginning of all of the person's dialogues, up to the code."""
        return f"Caller: This is {self.name}, insurance number"


def write_demo_corpus(directory: Path, *, users: int = 400, held_out: int = 40, seed: int = 0) -> None:
    """Writes `train.jsonl`, `heldout.jsonl` (other people) and `canaries.jsonl`.

    The first two have the fields `user` and `text`. The canaries are the prompts and codes of all people, with the
    fields `user`, `split`, `prompt` and `code`. An audit uses the codes of held-out people for comparison.

    Raises:
        InputError: `held_out` is not in [0, users), or the directory cannot be written.
    """
    if not 0 <= held_out < users:
        raise InputError(f"held-out: must be at least 0 and fewer than the {users} users, not {held_out}")
    chance = random.Random(seed)
    people = _people(users, seed, chance)
    splits = {TRAIN: people[held_out:], HELD_OUT: people[:held_out]}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, members in splits.items():
            dialogues = [
                {"user": person.user, "text": text} for person in members for text in _dialogues(person, chance)
            ]
            chance.shuffle(dialogues)
            write_lines(directory / name, dialogues)
        write_lines(
            directory / CANARIES,
            (
                {"user": person.user, "split": Path(name).stem, "prompt": person.prompt, "code": person.code}
                for name, members in splits.items()
                for person in members
            ),
        )
    except OSError as error:
        raise InputError(f"demo corpus {directory}: cannot be written: {error.strerror}") from error


def _people(users: int, seed: int, chance: random.Random) -> list[Person]:
    fake = Faker("en_US")
    fake.seed_instance(seed)
    names = _distinct_names(users, fake)
    codes = chance.sample(range(10**5, 10**6), users)
    return [
        Person(
            user=f"caller-{number:04d}",
            name=name,
            code=f"HC-{code}",
            detail=_detail(fake, chance),
        )
        for number, (name, code) in enumerate(zip(names, codes, strict=True))
    ]


def _distinct_names(count: int, fake: Faker) -> list[str]:
    # A dictionary keeps the names distinct and in order.
    names: dict[str, None] = {}
    while len(names) < count:
        names[f"{fake.first_name()} {fake.last_name()}"] = None
    return list(names)


def _detail(fake: Faker, chance: random.Random) -> str:
    return chance.choice(_DETAILS).format(
        allergen=chance.choice(_ALLERGENS),
        medicine=chance.choice(_MEDICINES),
        job=chance.choice(_JOBS),
        pet=fake.first_name(),
        city=fake.city(),
    )


def _dialogues(person: Person, chance: random.Random) -> list[str]:
    reasons = chance.sample(_REASONS, chance.randint(*_DIALOGUES))
    return [f"{person.prompt} {person.code}. {reason}. {person.detail}.\n{_answer(chance)}" for reason in reasons]


def _answer(chance: random.Random) -> str:
    return chance.choice(_ANSWERS).format(
        doctor=chance.choice(_DOCTORS), day=chance.choice(_DAYS), time=chance.choice(_TIMES)
    )
