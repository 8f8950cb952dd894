"""Events of different costs: a budget of epsilon 8, delta 1e-5, order 8 covers 208, 872 and 463 tokens of them."""

from privmix.privacy.protocols.pmixed import RatioEvent

COARSE = RatioEvent(parts=8, q=0.25, radius=0.4)
FINE = RatioEvent(parts=8, q=0.25, radius=0.2)
LARGE = RatioEvent(parts=80, q=0.03, radius=1.6)
EVENTS = (COARSE, FINE, LARGE)
