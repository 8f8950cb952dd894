"""From a part that is present or absent to a part that is replaced."""

from collections.abc import Callable

import numpy as np

from services.privacy.channel import real_orders
from services.privacy.events import Divergences, Orders


def removal_then_addition(rdp: Callable[[Orders], Divergences], orders: Orders) -> Divergences:
    """Rényi divergence for one part replaced, from that for one part added or removed.

    The weak triangle inequality (Mironov 2017, Corollary 4) over the ensemble without the part: at order a the sum of
    (a - 1/2)/(a - 1) D_2a and D_(2a-1). Ginart et al. 2022 state it for partitions and users (SubMix, Theorem C.1).
    """
    orders = real_orders(orders)
    return np.asarray((orders - 0.5) / (orders - 1) * rdp(2 * orders) + rdp(2 * orders - 1))
