"""Releases one private token without a service, from rows that a program has: `python private_token.py`.

The program keeps the account: it stops after the number of tokens that the radius was planned for.
"""

import torch

from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.sampling.categorical import sample

PARTS, VOCABULARY = 16, 1000

protocol = ExponentialSettings(epsilon=8.0, delta=1e-5, tokens=1024, sample=PARTS).plan(PARTS)
print(f"radius {protocol.radius:.3f} for 1,024 tokens at epsilon 8")

public = torch.randn(1, VOCABULARY).log_softmax(1)  # the public model's row, and one for each drawn part
parts = (public + 0.5 * torch.randn(PARTS, VOCABULARY)).log_softmax(1)
drawn = protocol.draw()
release = protocol.distribution(shape(public, parts[list(drawn)], [drawn]))
print(f"token {sample(release.weights)[0]}")
