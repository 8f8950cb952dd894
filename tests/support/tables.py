"""Tables with a binary target."""

import numpy as np

from privmix.laboratory.heads.table import Table


def generated(rows: int = 600, users: int | None = None) -> Table:
    """Returns rows whose target is a noisy linear function of three features."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(rows, 3)).astype(np.float32)
    y = (x @ [2.0, -1.0, 0.5] + 0.3 * rng.normal(size=rows) > 0).astype(np.float32)
    owners = np.arange(rows) if users is None else rng.integers(0, users, size=rows)
    return Table("generated", x, y, owners, "public", "record" if users is None else "user", users or rows)
