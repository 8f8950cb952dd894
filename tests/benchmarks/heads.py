"""Compares the training time of ExpM+NF and DP-SGD over the same epochs: `python -m tests.benchmarks.heads --json`.

- `expm_nf_s`: processor seconds of one ExpM+NF training, the minimum of several alternating runs.
- `opacus_s`: the same for DP-SGD with Opacus' engine and data loader, as in its documentation; `ratio` is to this one.
- `bare_s`: the same for DP-SGD in `privmix.laboratory.heads.sgd`; `ratio_bare`.
"""

import time
import warnings
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privmix.laboratory.heads import expm_nf, methods, sgd
from privmix.laboratory.heads.data import DATASETS
from privmix.laboratory.heads.expm_nf import ExpMNFSettings, FitSettings
from privmix.laboratory.heads.flows import FlowSettings
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show


def seconds(work: Callable[[], object]) -> float:
    """Returns the processor seconds of this process, which other load hardly affects."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def opacus(model: nn.Module, x: Tensor, y: Tensor, multiplier: float, batch: int, epochs: int) -> None:
    """Runs DP-SGD with Opacus' engine."""
    from opacus import PrivacyEngine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, loader = PrivacyEngine(accountant="prv").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
            noise_multiplier=multiplier,
            max_grad_norm=1.0,
        )
        for _ in range(epochs):
            for rows, targets in loader:
                optimizer.zero_grad()
                (private(rows) - targets).square().mean().backward()
                optimizer.step()


def heads(
    dataset: Annotated[str, typer.Option(help="rand, breast-cancer or clinic.")] = "rand",
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    batch: Annotated[int, typer.Option(min=1)] = 1024,
    samples: Annotated[int, typer.Option(min=1, help="Parameter vectors in each step of ExpM+NF.")] = 32,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One epoch, once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures one training of each method, on one thread."""
    torch.set_num_threads(1)
    epochs, repeats, samples = (1, 1, 2) if quick else (epochs, repeats, samples)
    table = DATASETS[dataset]()
    make, model = methods.build(table), methods.parametrised(table)
    x, y = torch.from_numpy(table.x), torch.from_numpy(table.y)
    noise = sgd.noise_for(1.0, methods.DELTA, len(x), batch, epochs)
    fit = FitSettings(steps=noise.steps, samples=samples, patience=0)
    settings = ExpMNFSettings(flow=FlowSettings(sigma=0.01), fit=fit, batch=batch)
    private = sgd.HeadDpSgdSettings(loss="l2", batch=batch, epochs=epochs)
    sgd.train_privately(make(), x, y, noise, private)  # loads what the first call loads
    pairs = [
        (
            seconds(lambda: expm_nf.train(model, x, y, 1.0, settings, seed=0)),
            seconds(lambda: opacus(make(), x, y, noise.multiplier, batch, epochs)),
            seconds(lambda: sgd.train_privately(make(), x, y, noise, private)),
        )
        for _ in range(repeats)
    ]
    flow, engine, bare = (min(times) for times in zip(*pairs, strict=True))
    report = {
        "steps": noise.steps,
        "expm_nf_s": flow,
        "opacus_s": engine,
        "bare_s": bare,
        "ratio": flow / engine,
        "ratio_bare": flow / bare,
    }
    show(report, as_json)


if __name__ == "__main__":
    typer.run(heads)
