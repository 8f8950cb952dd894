"""Claim: each way to ask for a structure is checked, and the answers of a request take together what is bounded."""

import pytest

from privmix.gateway import structure as reading
from privmix.gateway.errors import ApiError
from privmix.gateway.schema import ChatRequest
from privmix.gateway.structure import structure_of
from privmix.structure.compiler import Compiler
from privmix.structure.grammar import of_json_schema
from tests.support.structure import words

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODY = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "n": 3}


async def grammar_of(answers: int, compiler: Compiler, **wish: object) -> str | None:
    structure = await structure_of(ChatRequest.model_validate({**BODY, **wish}), answers, compiler, "client")
    return None if structure is None else structure.grammar


@pytest.mark.anyio
async def test_many_answers_with_a_costly_structure_are_refused_by_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(words)
    assert await grammar_of(128, compiler, structured_outputs={"json": SCHEMA}) == of_json_schema(SCHEMA)
    for wish in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert await grammar_of(1, compiler, **wish) == of_json_schema({"type": "object"})
    monkeypatch.setattr(reading, "MAX_CPU_S", 0)
    assert await grammar_of(1, compiler, structured_outputs={"json": SCHEMA})
    with pytest.raises(ApiError, match="at most 1 answers") as refusal:
        await grammar_of(2, compiler, structured_outputs={"json": SCHEMA})
    assert (refusal.value.status, refusal.value.param) == (400, "n")
