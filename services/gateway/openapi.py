"""The description of the HTTP API, made from the pydantic models that validate it."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


class Error(BaseModel):
    """A failure in OpenAI's shape; `param` names the field of the request that is at fault, if one is."""

    message: str
    type: str
    param: str | None
    code: str


class Failure(BaseModel):
    """The body of every answer that is no success."""

    error: Error


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": description}
    for status, description in {
        400: "The request cannot be served as it is; `param` names the field.",
        401: "No key of this service.",
        403: "The key does not have the scope that this route needs.",
        404: "There is no such model, key or route.",
        413: "The body is too large.",
        429: "A limit of the key, the privacy budget, or the service's capacity; see the headers.",
        503: "A part of the service does not answer.",
    }.items()
}


def body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body by hand, for the limit on its size and for OpenAI's errors."""
    reference = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def describe(app: FastAPI, bodies: tuple[type[BaseModel], ...]) -> None:
    """Let the app describe itself, with the schemas of the bodies that `body` names."""

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
