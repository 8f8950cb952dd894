"""Builds the OpenAPI description of the HTTP API from the pydantic models that validate it."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


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
