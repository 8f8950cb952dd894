"""Implements PATE with GNMax (Papernot et al. 2017, 2018): models of disjoint parts label queries for a student.

All rows of one user are in one part. The model of each part votes for a label of each query, and the plurality under
discrete Gaussian noise is the label. Queries are public or drawn without the private rows. The student, a head, learns
from the queries and their labels alone, so it answers any number of queries at no further cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal
from uuid import uuid4

import numpy as np
import torch
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.func import functional_call, vmap

from services.heads import sgd
from services.heads.data import Table
from services.heads.models import Parametrised
from services.heads.sgd import SgdSettings
from services.privacy.accounting import planning
from services.privacy.events import PLD_INTERVAL, Divergences, Event, Guarantee, Orders
from services.privacy.protocols.gnmax import SCALES, GNMaxEvent
from services.privacy.sampling.noise import Integers, discrete_gaussian


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
    unit: Literal["record", "user"] = "user"
    run: str | None = None

    def __post_init__(self) -> None:
        GNMaxEvent(self.parts, self.sigma)  # validates both
        if not isinstance(self.queries, int) or self.queries < 1:
            raise ValueError(f"queries must be an integer of at least 1, got {self.queries}")
        if self.unit not in ("record", "user"):
            raise ValueError(f"unit must be record or user, got {self.unit!r}")

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
                f"the number of {self.unit}s is public",
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

    A user's place depends on a seed and the user's number alone, and R on the number of users. So no user changes the
    shape, or the rounding, of another part's training.
    """
    users = np.unique(table.users, return_inverse=True)[1]
    nth = _nth_of_its_user(users)
    kept = nth < (settings.rows_per_user if table.unit == "user" else 1)
    count, per_user = int(users.max()) + 1, settings.rows_per_user if table.unit == "user" else 1
    place = np.random.default_rng(seed).permutation(count)[users]
    part, row = place % settings.parts, place // settings.parts * per_user + nth
    rows = -(-count // settings.parts) * per_user
    x = torch.zeros(settings.parts, rows, *table.x.shape[1:])
    y, mask = torch.zeros(settings.parts, rows), torch.zeros(settings.parts, rows)
    where = torch.from_numpy(part[kept]), torch.from_numpy(row[kept])
    x[where], y[where], mask[where] = torch.from_numpy(table.x[kept]), torch.from_numpy(table.y[kept]), 1.0
    return x, y, mask


def _nth_of_its_user(users: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for each row how many earlier rows its user has, int64 [n]."""
    order = np.argsort(users, kind="stable")
    first = np.searchsorted(users[order], users[order])
    nth = np.empty(len(users), dtype=np.int64)
    nth[order] = np.arange(len(users)) - first
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
