"""Renders HTML reports as single files with embedded figures."""

import base64
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure


def render(template: Path, *, filters: Mapping[str, Callable[..., str]] | None = None, **values: Any) -> str:
    """Renders a Jinja template with `values`, which are escaped.

    Raises:
        jinja2.UndefinedError: the template names a value that is missing.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters or {}
    return environment.get_template(template.name).render(**values)


def picture(figure: Figure | bytes) -> str:
    """Returns a figure, or the bytes of a PNG file, as the `src` of an image inside a page."""
    if isinstance(figure, Figure):
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=120)
        figure = file.getvalue()
    return f"data:image/png;base64,{base64.b64encode(figure).decode()}"
