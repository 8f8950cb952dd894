"""Translates what a request says about the form of its answer to a grammar, and checks it."""

from collections.abc import Iterator
from typing import Any

from services.requests.errors import invalid, unavailable
from services.requests.schema import ChatRequest, GenerationRequest, ResponseFormat, StructuredOutputs
from services.structure.errors import StructureError
from services.structure.grammar import ANY_OBJECT, Kind
from services.structure.trials import TrialError, Trials

Wish = tuple[str, Kind, Any]
"""The field that asks for a structure, its kind, and what it says (`of_kind`)."""


async def grammar_of(request: GenerationRequest, answers: int, trials: Trials, cache_salt: str) -> str | None:
    """Returns the grammar of the answers to a request; None if they are plain text.

    Args:
        answers: the number of answers, each of which compiles the grammar.
        cache_salt: see `Trials.grammar`.

    Raises:
        ApiError: 400, the structure is invalid, too large or admits no answer, it costs too much for this number of
            answers, or the request asks for several structures; 503, it cannot be tried.
    """
    wishes = list(_wishes(request))
    if not wishes:
        return None
    if len(wishes) > 1:
        raise invalid(wishes[1][0], f"conflicts with {wishes[0][0]}; give only one of them")
    field, kind, described = wishes[0]
    try:
        tried = await trials.grammar(kind, described, cache_salt)
    except StructureError as error:
        raise invalid(field, str(error)) from None
    except TrialError:
        raise unavailable("structured answers are not available now") from None
    if answers > (most := trials.most_answers(tried)):
        raise invalid(
            "n", f"{field} takes long to compile for each answer; request at most {most} answers, or simplify it"
        )
    return tried.grammar


def _wishes(request: GenerationRequest) -> Iterator[Wish]:
    if isinstance(request, ChatRequest) and request.callable_tools:
        tools = {function.name: function.parameters for function in request.callable_tools}
        yield "tools", "tools", tools
    if request.response_format is not None:
        yield from _response_format(request.response_format)
    if request.structured_outputs is not None:
        yield from _structured_outputs(request.structured_outputs)


def _response_format(wish: ResponseFormat) -> Iterator[Wish]:
    if wish.type == "json_object":
        yield "response_format", "json", ANY_OBJECT
    elif wish.json_schema is not None:
        yield "response_format.json_schema.schema", "json", wish.json_schema.schema_


def _structured_outputs(wish: StructuredOutputs) -> Iterator[Wish]:
    described: dict[Kind, Any] = {"regex": wish.regex, "choice": wish.choice, "grammar": wish.grammar}
    if wish.json_ is not None:
        yield "structured_outputs.json", "json", wish.json_
    for kind, value in described.items():
        if value is not None:
            yield f"structured_outputs.{kind}", kind, value
    if wish.json_object:
        yield "structured_outputs.json_object", "json", ANY_OBJECT
