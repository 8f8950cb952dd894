"""Builds the OpenAPI description of the HTTP API from the pydantic models that validate it."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


class Error(BaseModel):
    """An error in OpenAI's format. `param` names the invalid field of the request, if there is one."""

    message: str
    type: str
    param: str | None
    code: str


class Failure(BaseModel):
    """The body of every response with an error."""

    error: Error


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": description}
    for status, description in {
        400: "A field of the request is invalid; `param` names it.",
        401: "The request has no valid key of this service.",
        403: "The key does not have the scope that this route needs, or a web page called a service without keys.",
        404: "The model, key or route does not exist.",
        408: "The body was not complete in time.",
        413: "The body is too large.",
        415: "The body is compressed, or its content type is not the route's.",
        429: "The request exceeds a limit of the key, the privacy budget or the service's capacity; see the headers.",
        503: "A part of the service does not answer.",
    }.items()
}


def body(model: type[BaseModel]) -> dict[str, Any]:
    """Returns `openapi_extra` for a route that reads its body itself, to limit its size and to return OpenAI errors."""
    reference = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def describe(app: FastAPI, bodies: tuple[type[BaseModel], ...]) -> None:
    """Adds the schemas of the request bodies to the app's OpenAPI description."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = get_openapi(title=app.title, version=version("privmix"), routes=app.routes)
            _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=_REFERENCE)
            components = description.setdefault("components", {}).setdefault("schemas", {})
            components |= schemas["$defs"]
            description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            description["security"] = [{"key": []}, {}]
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
