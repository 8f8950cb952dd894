"""Collects the privacy statements of several models and their joint guarantee."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from services.budget.statement import Statement
from services.budget.together import JointGuarantee, together
from services.gateway.models import ServedModel


class ModelStatement(Statement):
    """Holds the statement of one model."""

    model: str


class Statements(BaseModel):
    """Holds the statements of several models. `together` is the guarantee for a person whose text is in all of them,
    except that it is in one ensemble of each cohort."""

    object: Literal["list"] = "list"
    data: list[ModelStatement]
    together: JointGuarantee


async def statements_of(models: Sequence[ServedModel]) -> Statements:
    """Returns the statements of these models.

    Raises:
        ApiError: 503, a budget actor does not answer.
    """
    statements = await asyncio.gather(*(model.status.statement() for model in models))
    by_name = {model.ensemble.name: statement for model, statement in zip(models, statements, strict=True)}
    data = [ModelStatement(model=name, **dict(statement)) for name, statement in by_name.items()]
    cohorts = {model.ensemble.name: model.ensemble.cohort for model in models}
    return Statements(data=data, together=together(by_name, cohorts))
