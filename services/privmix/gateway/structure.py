"""Translates what a request says about the form of its answer to a grammar, and checks it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from privmix.gateway.errors import invalid
from privmix.gateway.schema import GenerationRequest
from privmix.structure.compiler import Compiler
from privmix.structure.errors import StructureError
from privmix.structure.grammar import of_choice, of_json_schema, of_regex

ANY_OBJECT = {"type": "object"}
MAX_CPU_S = 4.0
"""The seconds of a processor that the compilations of all answers to a request may take."""
REGEX = "structured_outputs.regex"
"""The field whose texts a stop string may end, as in vLLM's examples. It would break JSON, or the text of a choice."""


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
        return self.field == REGEX


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
    field, make = wishes[0]
    try:
        begun = await compiler.begun(make, client)
    except StructureError as error:
        raise invalid(field, str(error)) from None
    if answers > (most := max(1, int(MAX_CPU_S / max(begun.cpu_s, 1e-6)))):
        raise invalid(
            "n", f"{field} takes long to compile for each answer; request at most {most} answers, or simplify it"
        )
    return Structure(field, begun.grammar, begun.start.shortest or 0)


def _wishes(request: GenerationRequest) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields each field that asks for a structure, with a function that returns the grammar."""
    wanted, wish = request.response_format, request.structured_outputs
    if wanted is not None and wanted.json_schema is not None:
        yield "response_format.json_schema.schema", partial(of_json_schema, wanted.json_schema.schema_)
    elif wanted is not None and wanted.type == "json_object":
        yield "response_format", partial(of_json_schema, ANY_OBJECT)
    if wish is not None and wish.json_ is not None:
        yield "structured_outputs.json", partial(of_json_schema, wish.json_)
    if wish is not None and wish.json_object:
        yield "structured_outputs.json_object", partial(of_json_schema, ANY_OBJECT)
    if wish is not None and wish.regex is not None:
        yield REGEX, partial(of_regex, wish.regex)
    if wish is not None and wish.choice is not None:
        yield "structured_outputs.choice", partial(of_choice, wish.choice)
