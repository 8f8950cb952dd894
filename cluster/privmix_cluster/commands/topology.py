"""Implements `privmix topology`, which shows the parts of each shard before anything is started."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from privmix_cluster.options import JsonOption

if TYPE_CHECKING:
    from privmix.fleet.plan import ShardPlan
    from privmix.training.manifest import Manifest


def topology(
    config: Annotated[Path, typer.Option(help="The YAML file of the deployment.")],
    gpus: Annotated[int, typer.Option(min=0, help="The number of GPUs in the cluster.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the shards of a deployment with their parts, their copies, and the resources that each copy reserves."""
    from privmix.training.manifest import Manifest
    from privmix.training.public_model import resolve
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.topology import plan_shards, shards_served

    configuration = Configuration.load(config)
    manifest = Manifest.load(configuration.ensemble)
    model = resolve(configuration.model or manifest.base_model)
    halves = configuration.privacy.plan(1).halves
    plans = plan_shards(configuration, manifest, model, gpus, halves=halves)
    serving = shards_served(configuration, manifest)
    rows = [_row(plan, plan.index < serving) for plan in plans]
    if as_json:
        print(json.dumps({"ensemble": manifest.ensemble, "halves": halves, "shards": rows}, indent=2))
    else:
        _show(manifest, rows)


def _row(plan: "ShardPlan", serves: bool) -> dict[str, Any]:
    return {
        "shard": plan.shards[0],
        "first_part": plan.part_numbers[0],
        "last_part": plan.part_numbers[-1],
        "models": len(plan.models),
        "actors": list(plan.shards),
        "num_cpus": plan.num_cpus,
        "num_gpus": plan.num_gpus,
        "serves": serves,
    }


def _show(manifest: "Manifest", rows: list[dict[str, Any]]) -> None:
    served = sum(row["last_part"] - row["first_part"] + 1 for row in rows if row["serves"])
    title = f"Ensemble {manifest.ensemble}: {served} of {len(manifest.parts)} parts serve from the start"
    table = Table("shard", "parts", title=title, title_justify="left")
    for name in ("models", "copies", "CPUs each", "GPUs each"):
        table.add_column(name, justify="right")
    table.add_column("serves")
    for row in rows:
        table.add_row(
            row["shard"],
            f"{row['first_part']} to {row['last_part']}",
            str(row["models"]),
            str(len(row["actors"])),
            f"{row['num_cpus']:g}",
            f"{row['num_gpus']:g}",
            "from the start" if row["serves"] else "after `privmix scale`",
        )
    Console().print(table)
