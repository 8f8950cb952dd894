"""What earlier versions promised: one part present or absent. `privmix plan` shows it beside a user's epsilon.

A user's text in the corpus or not replaces a part's model, so no promise of the service is made with these numbers.
"""

import numpy as np
from scipy.special import log_expit

from services.privacy.accounting.bounded_range import bounded_range_rdp
from services.privacy.accounting.dominating_pair import Channel
from services.privacy.accounting.published import log_binomial
from services.privacy.events import Divergences, Event, Orders
from services.privacy.protocols.exponential import FixedSizeExponentialEvent
from services.privacy.protocols.gnmax import GNMaxEvent
from services.privacy.protocols.pmixed import RatioEvent
from services.privacy.protocols.subsample_aggregate import SubsampleAggregateEvent


def part_level_rdp(event: Event, orders: Orders) -> Divergences | None:
    """Rényi divergence per token, one part present or absent; None where earlier versions had no such number."""
    match event:
        case RatioEvent(parts, q, radius):
            return seen_draws_channel(parts, q, radius).rdp(orders)
        case FixedSizeExponentialEvent(parts, sample, radius) if sample == parts:
            return bounded_range_rdp(orders, 2 * radius / parts)
        case GNMaxEvent() | SubsampleAggregateEvent():
            return event.rdp(orders) / 2
        case _:
            return None


def seen_draws_channel(parts: int, q: float, radius: float) -> Channel:
    """PMixED with the ratio mollifier, charged as if the number of parts drawn were seen.

    Rows, for m other parts drawn: m = 0 has the part's own ratio H or L against the public model; m >= 1 the corners
    (others, own) = (H, L), (L, H) and (L, L), of which the last tells nothing.
    """
    high, low = np.exp(radius), np.exp(-radius)
    log_pi = float(log_expit(-radius))
    log_m = log_binomial(parts - 1, q)
    alone, others = log_m[:1], log_m[1:]
    share = q / (np.arange(1, parts) + 1.0)
    log_q = [alone + log_pi, alone + log_pi + radius]
    log_ratio = [np.log1p([q * (high - 1)]), np.log1p([q * (low - 1)])]
    log_q += [others + log_pi + radius, others + log_pi - radius, others + np.log(np.tanh(radius / 2)) - radius]
    log_ratio += [np.log1p(share * (low / high - 1)), np.log1p(share * (high / low - 1)), np.zeros(parts - 1)]
    return Channel(np.concatenate(log_q), np.concatenate(log_ratio))
