"""Random rows of the public model and of parts, also extreme ones."""

from math import inf, nan

import torch
from torch import Tensor

VOCABULARY = 3000
PUBLIC = ("flat", "steep", "one-hot", "at the floor")
PARTS = ("near", "far", "one-hot", "disjoint", "zeros", "same", "broken")


def public_logits(kind: str, generator: torch.Generator) -> Tensor:
    noise = torch.randn(VOCABULARY, generator=generator)
    match kind:
        case "flat":
            return noise * 0.1
        case "steep":
            return noise * 8
        case "one-hot":
            return noise + torch.where(torch.arange(VOCABULARY) == 7, 15.0, 0.0)
        case _:
            return torch.where(torch.arange(VOCABULARY) < 3, 0.0, -22.5 + noise.clamp(-0.5, 0.5))


def part_logits(kind: str, public: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(VOCABULARY, generator=generator)
    match kind:
        case "near":
            return public + 0.3 * noise
        case "far":
            return 6 * noise
        case "one-hot":
            return torch.where(torch.arange(VOCABULARY) == int(public.argmin()), 40.0, noise)
        case "disjoint":
            return -3 * public
        case "zeros":
            return torch.where(torch.arange(VOCABULARY) % 100 == 11, 0.0, -inf)
        case "same":
            return public
        case _:
            return torch.full((VOCABULARY,), nan)
