"""Plans of test fleets: one shard per part, on the CPU with one thread."""

from pathlib import Path

from privmix.engine.engine import EngineSettings
from privmix.fleet.plan import ShardPlan
from privmix.privacy.protocols.pmixed import PMixedSettings

SETTINGS = PMixedSettings(tokens=5000, q=0.5)


def plans(model: Path, adapters: dict[str, Path], num_cpus: float = 0.2) -> tuple[ShardPlan, ...]:
    return tuple(
        ShardPlan(
            index=index,
            parts=1,
            models={index: name},
            engine=EngineSettings(model, "transformers", "float32", 512, adapters={name: path}),
            num_cpus=num_cpus,
            num_gpus=0,
            environment={"OMP_NUM_THREADS": "1"},
        )
        for index, (name, path) in enumerate(adapters.items())
    )
