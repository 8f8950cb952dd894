"""Real events of different costs: at epsilon 8, delta 1e-5 and order 8 they buy 208, 872 and 463 tokens."""

from services.privacy.protocols.pmixed import RatioEvent

COARSE = RatioEvent(parts=8, q=0.25, radius=0.4)
FINE = RatioEvent(parts=8, q=0.25, radius=0.2)
LARGE = RatioEvent(parts=80, q=0.03, radius=1.6)
EVENTS = (COARSE, FINE, LARGE)
