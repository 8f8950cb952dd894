"""Translates what a request says about the form of its answer to a grammar, and checks it."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.requests.errors import invalid
from services.requests.schema import GenerationRequest, StructuredOutputs
from services.structure import grammar
from services.structure.compiler import Compiler
from services.structure.errors import StructureError

Wish = tuple[str, Callable[[], str]]
"""The field that asks for a structure, and a function that returns its grammar."""

_CUT_BY_STOP = ("structured_outputs.regex", "structured_outputs.grammar")
"""Structures whose texts a stop string may end, as vLLM's examples do. It would break JSON, or the text of a choice."""


@dataclass(frozen=True)
class Structure:
    """Describes the form of the answers to a request.

    Attributes:
        field: the field of the request that asks for it.
        shortest: the number of tokens that an answer needs (`Compiler.check`).
    """

    field: str
    grammar: str
    shortest: int

    @property
    def has_stops(self) -> bool:
        """Whether a stop string ends an answer."""
        return self.field in _CUT_BY_STOP


async def structure_of(request: GenerationRequest, compiler: Compiler, cache_salt: str) -> Structure | None:
    """Returns the structure of the answers to a request; None if they are plain text.

    Args:
        cache_salt: see `Compiler.check`.

    Raises:
        ApiError: 400, the structure is invalid, too large or admits no answer, or the request asks for several.
    """
    wishes = list(_wishes(request))
    if not wishes:
        return None
    if len(wishes) > 1:
        raise invalid(wishes[1][0], f"conflicts with {wishes[0][0]}; give only one of them")
    field, make = wishes[0]
    try:
        made = await asyncio.to_thread(make)
        return Structure(field, made, await compiler.check(made, cache_salt))
    except StructureError as error:
        raise invalid(field, str(error)) from None


def _wishes(request: GenerationRequest) -> Iterator[Wish]:
    if request.callable_tools:
        tools = {function.name: function.parameters for function in request.callable_tools}
        make = grammar.of_tool_call if request.must_call else grammar.of_text_or_tool_call
        yield "tools", lambda: make(tools)
    if (wanted := request.json_answer) is not None:
        field, schema = wanted
        yield field, lambda: grammar.of_json_schema(schema)
    if request.structured_outputs is not None:
        yield from _structured_outputs(request.structured_outputs)


def _structured_outputs(wish: StructuredOutputs) -> Iterator[Wish]:
    field = "structured_outputs"
    schema, regex, choice, text = wish.json_, wish.regex, wish.choice, wish.grammar
    if schema is not None:
        yield f"{field}.json", lambda: grammar.of_json_schema(_parsed(schema))
    if regex is not None:
        yield f"{field}.regex", lambda: grammar.of_regex(regex)
    if choice is not None:
        yield f"{field}.choice", lambda: grammar.of_choice(choice)
    if text is not None:
        yield f"{field}.grammar", lambda: grammar.of_grammar(text)
    if wish.json_object:
        yield f"{field}.json_object", grammar.of_json_object


def _parsed(schema: grammar.Schema | str) -> grammar.Schema:
    """Returns a schema, which vLLM also accepts as JSON text."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict | bool):
        raise StructureError("give a JSON Schema as an object or as its JSON text")
    return parsed
