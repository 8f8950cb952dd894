"""Computes log-probabilities of the public model and of adapters at each token of texts, on the most likely tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from privmix.engine.engine import AdapterFiles
from privmix.laboratory.evaluation.scoring import Scorer
from privmix.laboratory.evaluation.text import Block


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """The models' outputs for S queries, each on its own k tokens.

    Attributes:
        public: float32 [S, k], log-probabilities of the public model.
        models: float32 [N, S, k], log-probabilities of the N models.
        wanted: int64 [S], the index among the k tokens of the attacker's target.
    """

    public: Tensor
    models: Tensor
    wanted: Tensor

    @property
    def of_wanted(self) -> Tensor:
        """The log-probabilities of the target, float32 [1 + N, S], of the public model first."""
        rows = torch.cat([self.public[None], self.models])
        return rows[:, torch.arange(len(self.wanted)), self.wanted]


def read_outputs(
    base: Path, adapters: Sequence[AdapterFiles], asked: Sequence[tuple[str, str]], top_k: int
) -> list[ModelOutput]:
    """Returns the outputs of a base model and adapters at every token of each text after its prompt.

    Args:
        asked: prompts and texts.
        top_k: the number of the public model's most likely tokens to keep, like the service's option. If the text's own
            token is not among them, it replaces the least likely.
    """
    transformers_logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    scorer, blocks = Scorer(base, "float32"), []
    for prompt, text in asked:
        first, tokens = len(tokenizer(prompt)["input_ids"]), tokenizer(prompt + text)["input_ids"]
        blocks.append(Block(tuple(tokens), tuple(range(first, len(tokens)))))
    found, tokens_of = dict[int, ModelOutput](), dict[int, Tensor]()
    for _, index, hidden in scorer.hidden_states(blocks):
        public, own = scorer.head.log_probabilities(hidden).cpu(), blocks[index]
        kept, wanted = public.topk(top_k, dim=1).indices, torch.tensor(own.tokens)[list(own.targets)]
        missing = ~(kept == wanted[:, None]).any(dim=1)
        kept[missing, -1] = wanted[missing]
        place = (kept == wanted[:, None]).int().argmax(dim=1)
        tokens_of[index] = kept
        found[index] = ModelOutput(public.gather(1, kept), torch.empty(len(adapters), *kept.shape), place)
    for model, index, hidden in scorer.hidden_states(blocks, adapters) if adapters else ():
        found[index].models[model] = scorer.head.log_probabilities(hidden).cpu().gather(1, tokens_of[index])
    return [found[index] for index in range(len(blocks))]
