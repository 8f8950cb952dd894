"""Implements `privmix quickstart`, which trains a demo ensemble, serves it and requests one private answer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from privmix_cluster.console import Steps

if TYPE_CHECKING:
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.launch import Service

PARTS = 8
PROMPT = "Caller: Hello, I want to move my appointment.\nHarbor Clinic:"
MAX_TOKENS = 48
SETTINGS: dict[str, Any] = {
    "ensemble": "ensemble",
    "privacy": {"protocol": "pmixed", "q": 0.25, "epsilon": 8.0, "delta": 1e-5, "tokens": 1024},
    "budget": {"ledger": "ledger.db"},
    "engine": {"kind": "vllm", "dtype": "bfloat16", "context_length": 1024, "cache_gib": 2},
    "http": {"port": 8000, "max_tokens": 512},
}


def quickstart(
    directory: Annotated[Path, typer.Option(help="The directory for corpus, ensemble and ledger.")] = Path(
        "run/quickstart"
    ),
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1 to listen on.")] = 8000,
    stay: Annotated[bool, typer.Option("--stay", help="Keep serving until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on standard output.")] = False,
) -> None:
    """Train a demo ensemble, serve it with vLLM on Ray, and request one completion over HTTP."""
    from privmix_cluster.foreground import serving, wait_for_signal

    steps = Steps()
    configuration = prepare(directory, port, steps)
    with serving(configuration, steps) as service:
        steps("Requesting a completion over HTTP")
        outcome = {**request_completion(service), "seconds": round(steps.seconds, 1)}
        if as_json:
            print(json.dumps(outcome), flush=True)
        else:
            show(outcome, service, directory)
        if stay:
            steps(f"Serving on {service.url}/v1; stop with Ctrl-C")
            wait_for_signal()


def prepare(directory: Path, port: int, steps: Steps) -> "Configuration":
    """Prepares the public model, the demo corpus and the ensemble. Existing files are kept."""
    import yaml

    from privmix.training import demo
    from privmix.training.corpus import Corpus
    from privmix.training.plan import run_training
    from privmix.training.public_model import resolve
    from privmix.training.train import plan
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.console import display

    directory.mkdir(parents=True, exist_ok=True)
    steps("Preparing the public model")
    resolve()
    steps("Writing the demo corpus")
    corpus = directory / "corpus"
    demo.write_demo_corpus(corpus)
    steps(f"Training {PARTS} parts (finished parts are kept)")
    run_training(
        plan(Corpus(corpus / demo.TRAIN), directory / "ensemble", parts=PARTS, options=demo.TRAINING),
        display=display(),
    )
    path = directory / "privmix.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "http": {**SETTINGS["http"], "port": port}}, sort_keys=False))
    return Configuration.load(path)


def request_completion(service: "Service") -> dict[str, Any]:
    """Requests one completion over HTTP, and then what it cost."""
    import httpx

    body = {"model": "privmix", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0.7, "stop": ["\n"]}
    with httpx.Client(base_url=service.url, timeout=300) as client:
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        statement = client.get("/v1/privacy").raise_for_status().json()
    return {
        "completion": answer["choices"][0]["text"],
        "completion_tokens": answer["usage"]["completion_tokens"],
        **{name: statement[name] for name in ("epsilon_spent", "epsilon", "delta", "tokens_left")},
        "parts": service.shard_map.protocol.parts,
        "shards": len(service.shard_map.shards),
    }


def show(outcome: dict[str, Any], service: "Service", directory: Path) -> None:
    """Prints the answer, its cost and the next steps."""
    from privmix.budget.sentence import DIGITS
    from privmix.privacy.accounting import shown, stated

    console = Console(highlight=False)
    console.print(f"\n[dim]{PROMPT}[/][bold]{outcome['completion']}[/]\n", markup=True)
    console.print(f"{outcome['completion_tokens']} tokens charged, {outcome['tokens_left']} left")
    console.print(
        f"promised for all tokens that are ever released: epsilon {stated(outcome['epsilon'])} at delta "
        f"{outcome['delta']:g}; estimate of the epsilon spent so far: {shown(outcome['epsilon_spent'], DIGITS)}"
    )
    console.print(f"ledger: {service.configuration.budget.ledger}\n")
    console.print(f"To serve it again: [bold]privmix serve --config {directory / 'privmix.yaml'}[/], then\n")
    print(EXAMPLES.format(url=service.url))


EXAMPLES = """\
  curl {url}/v1/completions -H 'content-type: application/json' \\
    -d '{{"model": "privmix", "prompt": "Caller: Hello", "max_tokens": 32}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  print(client.completions.create(model="privmix", prompt="Caller: Hello", max_tokens=32).choices[0].text)
"""
