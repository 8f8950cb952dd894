"""Computes embeddings of texts with the public model: the mean of its last hidden states over a text's tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from privmix.privacy.arrays import Reals

_TOKENS = 256  # the maximum number of tokens of a text that the model reads
_BATCH = 16


class Embedder:
    """Embeds and tokenizes texts with one model.

    Args:
        model: the model's directory.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoModel, AutoTokenizer  # slow to import

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network = AutoModel.from_pretrained(model, dtype=torch.float32).to(device).eval()

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        return tokens

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], progress: Callable[[float], None] = lambda done: None) -> Reals:
        """Returns one row for each text, float64 [texts, hidden].

        A text's row does not depend on the other texts but for rounding: the padding is masked.

        Args:
            progress: called with the finished fraction after each batch.
        """
        tokens = [[self._tokenizer.eos_token_id, *self.tokens(text)][: _TOKENS + 1] for text in texts]
        order = sorted(range(len(texts)), key=lambda index: len(tokens[index]))
        rows = np.empty((len(texts), self._network.config.hidden_size))
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            rows[batch] = self._means([tokens[index] for index in batch])
            progress(min(1.0, (start + len(batch)) / len(order)))
        return rows

    def _means(self, batch: Sequence[Sequence[int]]) -> Reals:
        """Returns the mean over the tokens after the first, which only says where a text begins."""
        longest = max(map(len, batch))
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in batch])
        lengths = torch.tensor([len(tokens) for tokens in batch])
        mask = torch.arange(longest) < lengths[:, None]
        device = self._network.device
        answer = self._network(input_ids=ids.to(device), attention_mask=mask.long().to(device))
        states = answer.last_hidden_state.cpu().double()
        # A text without a token has the first state alone.
        counted = (mask & ((torch.arange(longest) > 0) | (lengths[:, None] == 1)))[:, :, None]
        means: Reals = ((states * counted).sum(dim=1) / counted.sum(dim=1)).numpy()
        return means
