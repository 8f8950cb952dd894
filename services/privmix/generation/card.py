"""Writes the data card of a job: the guarantee of the private text, its cost, and how the texts were generated."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from privmix.foundation.errors import InputError
from privmix.foundation.files import write_atomically
from privmix.foundation.json_lines import load_lines
from privmix.generation.job import OUTPUT, GenerationJob

CARD = "card.json"

COVERED = (
    "The guarantee is the service's. It covers all tokens that the service ever releases: these texts and all other "
    "answers. Any later use of the texts has no further privacy cost."
)
UNCOVERED = "The service promises no epsilon for these texts. Protect them as you protect the private text."

NOTES = (
    "The prompts are not protected: they are the client's text.",
    "Differential privacy, where it is promised, hides whether a user's text was in the corpus. It does not make the "
    "texts true, harmless or free of bias, and it does not hide what many users have in common.",
    "A killed process can lose tokens that the service released and charged: at most the tokens in transit in each "
    "stream. tokens_delivered does not count them.",
    "answered_without_the_parts counts texts by their model: `public` is the public model alone, `base` the private "
    "base alone, whose training the guarantee covers, and `mixed` either of them in part.",
)


def write_card(job: GenerationJob, statement: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the card atomically; returns its content.

    Args:
        statement: the response of `/v1/privacy` after the last text.
    """
    request, before = job.request, job.described.get("privacy", {})
    whole = [text for text in job.texts if text.finish_reason is not None]
    card = {
        "made_with": f"privmix {version('privmix')}",
        "begun": job.described["begun"],
        "date": datetime.now(UTC).date().isoformat(),
        "model": job.described.get("model"),
        **{name: statement.get(name) for name in ("guarantee", "epsilon", "delta", "adjacency")},
        "protocol": statement.get("event"),
        "budget": {
            "tokens_delivered": job.tokens,
            "tokens_charged_by_service": statement["tokens_charged"] - before.get("tokens_charged", 0),
            "epsilon_spent_before": before.get("epsilon_spent"),
            "epsilon_spent_after": statement.get("epsilon_spent"),
            "tokens_left": statement["tokens_left"],
        },
        "texts": {
            "asked_for": len(job.texts),
            "whole": len(whole),
            "continued_after_an_interruption": sum(text.asked > 1 for text in whole),
            "answered_without_the_parts": dict(Counter(text.answered_by for text in whole if text.answered_by)),
            "finish_reasons": dict(Counter(text.finish_reason for text in whole)),
        },
        "template": request.template,
        **({} if request.schema is None else {"schema": request.schema}),
        "sampling": asdict(request.sampling),
        "notes": [UNCOVERED if statement.get("epsilon") is None else COVERED, *NOTES],
    }
    write_atomically(job.directory / CARD, json.dumps(card, indent=2).encode() + b"\n")
    return card


def load(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Loads the complete texts of a job, and its card.

    Raises:
        InputError: one of them is missing or cannot be read.
    """
    try:
        return load_lines(directory / OUTPUT), json.loads((directory / CARD).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{directory}: has no {OUTPUT} with a {CARD}; run `privmix generate` on it again") from error
