"""Implements PATE with GNMax (Papernot et al. 2017, 2018): models of disjoint parts label queries for a student.

A hash of the user's id assigns all rows of one user to one part. The model of each part votes for a label of each
query, and the plurality under discrete Gaussian noise is the label. Queries are public or drawn without the private
rows. The student, a head, learns from the queries and their labels alone, so it answers any number of queries at no
further cost.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

import numpy as np
import torch
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.func import functional_call, vmap

from privmix.foundation.units import Unit, check_unit
from privmix.laboratory.heads import sgd
from privmix.laboratory.heads.models import Parametrised
from privmix.laboratory.heads.sgd import SgdSettings
from privmix.laboratory.heads.table import Table
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Integers
from privmix.privacy.events import PLD_INTERVAL, Divergences, Event, Guarantee, Orders
from privmix.privacy.protocols.gnmax import SCALES, GNMaxEvent
from privmix.privacy.sampling.noise import discrete_gaussian

# The capacity of a part lies this many standard deviations above its average number of owners.
_DEVIATIONS = 7.0


class PateSettings(BaseModel):
    """Configures the parts, the queries and the student.

    Attributes:
        parts: the number of parts.
        queries: the number of labels that the student learns from. Their noise grows with its root.
        rows_per_user: the number of rows of a user that are used; the first ones if there are more.
        steps: the number of RMSProp steps on all rows of a part.
        learning_rate: the learning rate of these steps.
        student: the training of the student.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: int = Field(200, ge=2)
    queries: int = Field(50, ge=2)
    rows_per_user: int = Field(4, ge=1)
    steps: int = Field(100, ge=1)
    learning_rate: float = Field(0.05, gt=0)
    student: SgdSettings = SgdSettings(epochs=200)


@dataclass(frozen=True)
class LabellingEvent(Event):
    """Describes all labels of one student.

    Attributes:
        parts: the number of parts.
        sigma: the scale of the noise, in votes.
        queries: the number of labels.
        unit: what is in one part: one row (``record``) or all rows of one ``user``.
        run: the id of the release. Equal releases with different ids add up.
    """

    kind: ClassVar[str] = "gnmax-labelling"
    once: ClassVar[bool] = True
    parts: int
    sigma: float
    queries: int
    unit: Unit = "user"
    run: str | None = None

    def __post_init__(self) -> None:
        GNMaxEvent(self.parts, self.sigma)  # validates both
        if not isinstance(self.queries, int) or self.queries < 1:
            raise ValueError(f"queries must be an integer of at least 1, got {self.queries}")
        check_unit(self.unit)

    def rdp(self, orders: Orders) -> Divergences:
        return np.asarray(self.queries * GNMaxEvent(self.parts, self.sigma).rdp(orders))

    def pld(self, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
        return GNMaxEvent(self.parts, self.sigma).pld(interval).self_compose(self.queries)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee(
            status="certified",
            source=GNMaxEvent(self.parts, self.sigma).guarantee.source,
            adjacency=self.unit,
            assumes=(
                f"each part's model depends on that part alone, and a {self.unit}'s part on nothing private",
                "the queries, the scaling of the features and every setting were chosen without the private rows",
                f"the number of {self.unit}s that was stated does not come from the private rows",
            ),
            seen="any number of predictions, or the model itself",
        )


def event(table: Table, epsilon: float, delta: float, settings: PateSettings) -> LabellingEvent:
    """Returns the event of a student whose labels have the least noise within (epsilon, delta).

    Raises:
        ValueError: no noise suffices.
    """
    sigma = planning.smallest(lambda sigma: GNMaxEvent(settings.parts, sigma), settings.queries, epsilon, delta, SCALES)
    return LabellingEvent(settings.parts, sigma, settings.queries, table.unit, uuid4().hex)


def release(
    make: Callable[[], nn.Module],
    table: Table,
    event: LabellingEvent,
    settings: PateSettings,
    *,
    public: Table | None = None,
    seed: int = 0,
) -> Tensor:
    """Returns a student's parameters [D], which cost the event.

    Args:
        make: constructs the model of the parts and of the student.
        public: public rows, whose features are the first queries. Others are drawn uniformly from [-1, 1]^F.
        seed: the seed of everything but the noise of the votes. It need not be secret.
    """
    torch.manual_seed(seed)
    queries = _queries(table, settings.queries, public)
    ones = votes(make, table, settings, seed, queries)
    counts = np.stack([settings.parts - ones, ones], axis=1)
    labels = discrete_gaussian(counts, event.sigma).argmax(axis=1).astype(np.float32)
    student = sgd.train(make(), queries, torch.from_numpy(labels), settings.student, seed)
    return Parametrised(student).vector


def votes(make: Callable[[], nn.Module], table: Table, settings: PateSettings, seed: int, queries: Tensor) -> Integers:
    """Returns the number of parts that vote for label 1 of each query, int64 [T]."""
    torch.manual_seed(seed)
    model = Parametrised(make())
    thetas = _train_parts(model, *_parts(table, settings, seed), settings)
    with torch.no_grad():
        ones = (model.outputs(thetas, queries) >= 0.5).sum(dim=0)
    return np.asarray(ones.numpy(), dtype=np.int64)


def _queries(table: Table, count: int, public: Table | None) -> Tensor:
    """Returns the features of `count` queries, float32 [count, ...]."""
    known = torch.from_numpy(public.x[:count]) if public is not None else torch.empty(0, *table.x.shape[1:])
    drawn = 2 * torch.rand(count - len(known), *table.x.shape[1:]) - 1
    return torch.cat([known, drawn])


def _parts(table: Table, settings: PateSettings, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns features [P, R, ...], targets [P, R] and a mask [P, R] of the rows of each part.

    R follows from the stated number of owners. So an owner who comes or goes changes neither the shape nor the rounding
    of another part's training. Rows that do not fit are left out: a negligible number, if the statement is about right.
    """
    per_owner = settings.rows_per_user if table.unit == "user" else 1
    mean = table.stated_population / settings.parts
    rows = int(np.ceil(mean + _DEVIATIONS * np.sqrt(mean + 1))) * per_owner
    part = np.where(_nth(table.users) < per_owner, _part_of(table, settings.parts, seed), -1)
    row = _nth(part)
    kept = (part >= 0) & (row < rows)
    x = torch.zeros(settings.parts, rows, *table.x.shape[1:])
    y, mask = torch.zeros(settings.parts, rows), torch.zeros(settings.parts, rows)
    where = torch.from_numpy(part[kept]), torch.from_numpy(row[kept])
    x[where], y[where], mask[where] = torch.from_numpy(table.x[kept]), torch.from_numpy(table.y[kept]), 1.0
    return x, y, mask


def _part_of(table: Table, parts: int, seed: int) -> NDArray[np.int64]:
    """Returns the part of each row, int64 [n]: a hash of the user, or of the row itself if it is its own owner.

    So the part of a row does not depend on other owners, not even on how many there are before it in the table.
    """
    if table.unit == "user":
        keys = (user.tobytes() for user in table.users)
    else:
        keys = (x.tobytes() + y.tobytes() for x, y in zip(table.x, table.y, strict=True))
    prefix = f"privmix part {seed}:".encode()
    digests = (hashlib.sha256(prefix + key).digest()[:8] for key in keys)
    return np.array([int.from_bytes(digest) % parts for digest in digests], dtype=np.int64)


def _nth(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for each value how many equal values precede it, int64 [n]."""
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values[order])
    nth = np.empty(len(values), dtype=np.int64)
    nth[order] = np.arange(len(values)) - first
    return nth


def _train_parts(model: Parametrised, x: Tensor, y: Tensor, mask: Tensor, settings: PateSettings) -> Tensor:
    """Trains one model for each part, all at once; returns their parameters [P, D].

    RMSProp divides each gradient by its own size, so the sum of the parts' losses trains each part as if alone.
    """
    thetas = model.vector.repeat(len(x), 1).requires_grad_()
    optimizer = torch.optim.RMSprop([thetas], lr=settings.learning_rate)
    outputs = vmap(lambda named, features: functional_call(model.module, named, (features,)))
    weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    for _ in range(settings.steps):
        optimizer.zero_grad()
        likely = outputs(model.named(thetas), x).clamp(1e-6, 1 - 1e-6)
        losses = nn.functional.binary_cross_entropy(likely, y, reduction="none")
        (weights * losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return thetas.detach()
