"""The statements of several models, and what they promise together."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from services.budget.statement import Statement
from services.budget.together import Together, together
from services.gateway.served import Served


class ModelStatement(Statement):
    """The statement of one model."""

    model: str


class Statements(BaseModel):
    """The statements of several models. `together` is the promise to a person whose text is in all of them."""

    object: Literal["list"] = "list"
    data: list[ModelStatement]
    together: Together


async def statements_of(models: Sequence[Served]) -> Statements:
    """
    Raises:
        ApiError: 503, the budget actor of one of them does not answer.
    """
    found = await asyncio.gather(*(served.status.statement() for served in models))
    stated = {served.ensemble.name: statement for served, statement in zip(models, found, strict=True)}
    data = [ModelStatement(model=name, **dict(statement)) for name, statement in stated.items()]
    return Statements(data=data, together=together(stated))
