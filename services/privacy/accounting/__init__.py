"""Computes the cost of events: composition, conversion to (epsilon, delta), and worst cases."""

from services.privacy.accounting.composition import (
    ORDERS as ORDERS,
)
from services.privacy.accounting.composition import (
    Epsilon as Epsilon,
)
from services.privacy.accounting.composition import (
    Spent as Spent,
)
from services.privacy.accounting.composition import (
    epsilon as epsilon,
)
from services.privacy.accounting.composition import (
    paid as paid,
)
from services.privacy.accounting.composition import (
    pld as pld,
)
from services.privacy.accounting.composition import (
    pld_epsilon as pld_epsilon,
)
from services.privacy.accounting.composition import (
    rdp as rdp,
)
from services.privacy.accounting.composition import (
    round_up as round_up,
)
from services.privacy.accounting.composition import (
    shown as shown,
)
from services.privacy.accounting.composition import (
    stated as stated,
)
