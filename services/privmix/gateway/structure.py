"""Translates what a request says about the form of its answer to a grammar, and checks it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from privmix.gateway.errors import invalid
from privmix.gateway.schema import GenerationRequest, StructuredOutputs
from privmix.structure.compiler import Compiler
from privmix.structure.errors import StructureError
from privmix.structure.grammar import ANY_OBJECT, StructureKind, of_kind

Wish = tuple[str, StructureKind, Any]
"""The field that asks for a structure, its kind, and what it says (`of_kind`)."""

MAX_CPU_S = 4.0
"""The seconds of a processor that the compilations of all answers to a request may take."""
_CUT_BY_STOP = ("structured_outputs.regex",)
"""Structures whose texts a stop string may end, as vLLM's examples do. It would break JSON, or the text of a choice."""


@dataclass(frozen=True)
class Structure:
    """Describes the form of the answers to a request.

    Attributes:
        field: the field of the request that asks for it.
        shortest: the number of tokens that an answer needs.
    """

    field: str
    grammar: str
    shortest: int

    @property
    def has_stops(self) -> bool:
        """Whether a stop string ends an answer."""
        return self.field in _CUT_BY_STOP


async def structure_of(request: GenerationRequest, answers: int, compiler: Compiler, client: str) -> Structure | None:
    """Returns the structure of the answers to a request; None if they are plain text.

    Args:
        answers: the number of answers, each of which compiles the grammar.
        client: see `Compiler.begun`.

    Raises:
        ApiError: 400, the structure is invalid, too large or admits no answer, it costs too much for this number of
            answers, or the request asks for several structures.
    """
    wishes = list(_wishes(request))
    if not wishes:
        return None
    if len(wishes) > 1:
        raise invalid(wishes[1][0], f"conflicts with {wishes[0][0]}; give only one of them")
    field, kind, described = wishes[0]
    try:
        begun = await compiler.begun(partial(of_kind, kind, described), client)
    except StructureError as error:
        raise invalid(field, str(error)) from None
    if answers > (most := max(1, int(MAX_CPU_S / max(begun.cpu_s, 1e-6)))):
        raise invalid(
            "n", f"{field} takes long to compile for each answer; request at most {most} answers, or simplify it"
        )
    return Structure(field, begun.grammar, begun.start.shortest or 0)


def _wishes(request: GenerationRequest) -> Iterator[Wish]:
    if (wanted := request.json_answer) is not None:
        field, schema = wanted
        yield field, "json", schema
    if request.structured_outputs is not None:
        yield from _structured_outputs(request.structured_outputs)


def _structured_outputs(wish: StructuredOutputs) -> Iterator[Wish]:
    described: dict[StructureKind, Any] = {
        "regex": wish.regex,
        "choice": wish.choice,
    }
    if wish.json_ is not None:
        yield "structured_outputs.json", "json", wish.json_
    for kind, value in described.items():
        if value is not None:
            yield f"structured_outputs.{kind}", kind, value
    if wish.json_object:
        yield "structured_outputs.json_object", "json", ANY_OBJECT
