"""Implements `privmix generate`, which writes synthetic text from a private ensemble and reports its quality."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from privmix.generation.template import DEFAULT, items, parse_labels, read_rows
from privmix_cluster.options import ProgressJsonOption
from privmix_cluster.parameters import bad

generate = typer.Typer(name="generate", invoke_without_command=True, no_args_is_help=True)


@generate.callback()
def make(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option(help="The job's directory. An interrupted job continues there.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON Lines with fields for the template. `count` is the number of texts for a line."),
    ] = None,
    label: Annotated[
        list[str], typer.Option(help="NAME=COUNT: a label and its number of texts; repeat for more.")
    ] = [],  # noqa: B006
    template: Annotated[
        str | None, typer.Option(help=f"The prompt, with {{fields}} in braces. Default for labels: {DEFAULT!r}.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The URL of a running service, such as http://127.0.0.1:8000.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar=["PRIVMIX_API_KEY", "OPENAI_API_KEY"], help="An API key of the service.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Instead of --url: start a service with this configuration for the job.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model name of the ensemble. Default: the service's first.")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="A JSON Schema of an object: generate records of this form, also as records.parquet."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The maximum number of tokens of a text.")] = 128,
    temperature: Annotated[float, typer.Option(help="The sampling temperature, above 0 and up to 2.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="The probability mass to sample from, above 0 and up to 1.")] = 1.0,
    stop_at: Annotated[list[str], typer.Option("--stop", help="A stop string; \\n is a new line.")] = [],  # noqa: B006
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="The number of concurrent texts.")] = 8,
    partial: Annotated[
        bool, typer.Option("--partial", help="If the budget cannot pay for all texts, generate as many as it can.")
    ] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also continue the same prompts with the public model, for comparison.")
    ] = False,
    public_model: Annotated[
        str | None, typer.Option(help="The model of --baseline. Default: the configuration's, or smollm2-135m.")
    ] = None,
    as_json: ProgressJsonOption = False,
) -> None:
    """Generate private synthetic texts from a template of prompts, with a data card.

    Delivered texts are kept and are never charged again: run the same command to continue. A job that costs more than
    the budget is refused before any token is charged. The exit status is 0 if the job is complete, 2 if the input is
    invalid, 1 if the job failed, and 130 if it was interrupted.
    """
    if context.invoked_subcommand is not None:
        return
    from privmix.generation.baseline import baseline_model, write_baseline
    from privmix.generation.client import Sampling
    from privmix.generation.job import JobRequest, load_output, opened
    from privmix.generation.records import read_schema, records_of, write_records
    from privmix.training.manifest import Manifest
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.work.generate import Shown, report_job, run_job, serving

    if output is None:
        raise bad("output", "is missing; add the directory of the job")
    if (url is None) == (config is None):
        raise bad("url", "give either --url of a running service, or --config to start one for the job")
    if bool(label) == (prompts is not None):
        raise bad("prompts", "give either --prompts with --template, or --label NAME=COUNT")
    if prompts is not None and template is None:
        raise bad("template", "is missing; write the fields of --prompts in braces: 'Topic: {topic}\\nText:'")
    rows = parse_labels(label) if prompts is None else read_rows(prompts)
    prompt_template = (template or DEFAULT).replace("\\n", "\n")
    record_schema = None if schema is None else read_schema(schema)
    sampling = Sampling(max_tokens, temperature, top_p, tuple(text.replace("\\n", "\n") for text in stop_at))
    request = JobRequest(prompt_template, tuple(items(prompt_template, rows)), sampling, record_schema)
    configuration = None if config is None else Configuration.load(config)
    base_model = None
    if configuration is not None:
        base_model = configuration.model or Manifest.load(configuration.ensemble).base_model
    compared = baseline_model(public_model, base_model) if baseline else None
    started = time.monotonic()
    with opened(output, request) as job:
        with serving(url, key, configuration) as (address, secret), Shown(len(request.items), as_json) as shown:
            card = asyncio.run(run_job(job, address, secret, model, concurrency, partial, shown.texts, base_model))
        if record_schema is not None:
            write_records(output, record_schema, records_of(load_output(output)))
        if compared is not None:
            with Shown(len(request.items), as_json) as shown:
                write_baseline(output, request, compared, shown.baseline)
    report_job(output, card, time.monotonic() - started, baseline, as_json)


@generate.command()
def report(
    directory: Annotated[Path, typer.Argument(help="The directory of a job.")],
    real: Annotated[Path | None, typer.Option(help="The private corpus to compare with. Needs --operator.")] = None,
    finetuned: Annotated[
        Path | None,
        typer.Option(
            help="An ensemble from `privmix train --parts 1`, to compute a second perplexity. Needs --operator."
        ),
    ] = None,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="Confirm that you may see the private text and will not publish the report."),
    ] = False,
    label_field: Annotated[
        str | None, typer.Option(help="The field that a classifier predicts, in the job's texts and in --real.")
    ] = None,
    user_field: Annotated[str, typer.Option(help="The field of --real with the user's id.")] = "user",
    text_field: Annotated[str, typer.Option(help="The field of --real with the text.")] = "text",
    public_model: Annotated[
        str | None, typer.Option(help="The public model: a directory or hub id. Default: smollm2-135m.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Compare the quality of a job's texts with the public model's texts, in an HTML page that opens offline."""
    from privmix.laboratory.generation.report import Real, make_report  # slow to import
    from privmix.training.public_model import resolve

    if (real is not None or finetuned is not None) and not operator:
        raise bad("operator", "is missing; a comparison with the private text is private, so confirm it")
    if label_field is not None and real is None:
        raise bad("label-field", "needs --real: the classifier is tested on real text")
    text = None if real is None else Real.load(real, user_field, text_field, label_field)
    content, page = make_report(
        directory, resolve(public_model), real=text, finetuned=finetuned, label_field=label_field
    )
    if as_json:
        print(json.dumps(content.record()))
        return
    for row in content.rows:
        distinct = ", ".join(f"{fraction:.2f}" for fraction in row.variety.distinct.values())
        print(f"{row.name}: {row.texts} texts, distinct-n {distinct}, perplexity {row.perplexity:.1f}")
    print(f"{page}: the report" + (", for the operator only: it is not private" if content.operator else ""))
