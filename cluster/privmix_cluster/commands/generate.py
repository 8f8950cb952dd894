"""Implements `privmix generate`, which writes synthetic text from a private ensemble."""

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privmix.foundation.errors import InputError
from privmix.generation.template import items, read_rows
from privmix_cluster.console import display
from privmix_cluster.options import ProgressJsonOption

if TYPE_CHECKING:
    from privmix.foundation.progress import Display
    from privmix.generation.client import ServiceClient
    from privmix.generation.job import GenerationJob


def generate(
    output: Annotated[Path, typer.Option(help="The job's directory. An interrupted job continues there.")],
    url: Annotated[str, typer.Option(help="The URL of a running service, such as http://127.0.0.1:8000.")],
    prompts: Annotated[
        Path,
        typer.Option(help="JSON Lines with fields for the template. `count` is the number of texts for a line."),
    ],
    template: Annotated[str, typer.Option(help="The prompt, with {fields} in braces; \\n is a new line.")],
    key: Annotated[
        str | None, typer.Option(envvar=["PRIVMIX_API_KEY", "OPENAI_API_KEY"], help="An API key of the service.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model name of the ensemble. Default: the service's first.")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="A JSON Schema of an object: generate records of this form."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The maximum number of tokens of a text.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.01, max=2, help="The sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="The probability mass to sample from.")] = 1.0,
    stop_at: Annotated[list[str], typer.Option("--stop", help="A stop string; \\n is a new line.")] = [],  # noqa: B006
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="The number of concurrent texts.")] = 8,
    partial: Annotated[
        bool, typer.Option("--partial", help="If the budget cannot pay for all texts, generate as many as it can.")
    ] = False,
    as_json: ProgressJsonOption = False,
) -> None:
    """Generate private synthetic texts from a template of prompts, with a data card.

    Delivered texts are kept and are never charged again: run the same command to continue. A job that costs more than
    the budget is refused before any token is charged. The exit status is 0 if the job is complete, 2 if the input is
    invalid, 1 if the job failed, and 130 if it was interrupted.
    """
    from privmix.generation.client import Sampling, ServiceClient
    from privmix.generation.job import JobRequest, opened

    prompt_template = template.replace("\\n", "\n")
    record_schema = None if schema is None else _schema(schema)
    sampling = Sampling(max_tokens, temperature, top_p, tuple(text.replace("\\n", "\n") for text in stop_at))
    request = JobRequest(prompt_template, tuple(items(prompt_template, read_rows(prompts))), sampling, record_schema)
    started = time.monotonic()
    with opened(output, request) as job, display() as shown:
        card = asyncio.run(_run(job, ServiceClient(url, key, model), concurrency, partial, shown))
    _report(output, card, time.monotonic() - started, as_json)


def _schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"schema {path}: cannot be read as JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InputError(f"schema {path}: must be a JSON Schema, which is an object")
    return schema


async def _run(
    job: "GenerationJob",
    client: "ServiceClient",
    concurrency: int,
    partial: bool,
    shown: "Display",
) -> dict[str, Any]:
    """Runs the job and writes its card, also if it fails after a text; returns the card."""
    from privmix.generation.card import write_card

    def progress(done: float) -> None:
        shown.show({"texts": done})

    async with client as service:
        try:
            await job.run(service, concurrency=concurrency, partial=partial, progress=progress)
        except BaseException:
            if job.done:
                with suppress(InputError):  # the service can be gone
                    write_card(job, await service.privacy())
            raise
        return write_card(job, await service.privacy())


def _report(output: Path, card: dict[str, Any], seconds: float, as_json: bool) -> None:
    from privmix.generation.card import CARD
    from privmix.generation.job import OUTPUT

    texts, budget = card["texts"], card["budget"]
    if as_json:
        complete = texts["whole"] == texts["asked_for"]
        summary = {"output": str(output / OUTPUT), "complete": complete, "seconds": round(seconds, 1), "card": card}
        print(json.dumps(summary))
        return
    print(f"{output / OUTPUT}: {texts['whole']} of {texts['asked_for']} texts, in {seconds:.0f} s")
    print(f"{budget['tokens_delivered']:,} tokens delivered; the card is {output / CARD}")
    print(card["guarantee"])
