"""Taking whole next-token rows out of vLLM on the device, without a Python object per vocabulary entry."""

from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

REQUEST_KEY = "privmix_request"
"""The sampling parameters' extra argument that carries a request's id to the logits processor."""


class Rows:
    """Where the captured log-probabilities of one engine step land: one row per expected request."""

    def __init__(self) -> None:
        self._position: Mapping[str, int] = {}
        self._values: torch.Tensor | None = None

    def expect(self, request_ids: list[str]) -> None:
        self._position = {request_id: row for row, request_id in enumerate(request_ids)}
        self._values = None

    def write(self, batch: Mapping[int, str], logits: torch.Tensor) -> None:
        """Keep the rows of expected requests. A partly prefilled request is overwritten by its last chunk."""
        known = [(index, self._position[request]) for index, request in batch.items() if request in self._position]
        if not known:
            return
        if self._values is None:
            self._values = torch.empty(len(self._position), logits.shape[1], dtype=torch.float32, device=logits.device)
        source, target = (torch.tensor(column, device=logits.device) for column in zip(*known, strict=True))
        self._values[target] = torch.log_softmax(logits[source], dim=-1, dtype=torch.float32)

    def take(self) -> torch.Tensor:
        if self._values is None:
            raise RuntimeError("the engine finished a step without producing logits")
        values, self._values = self._values, None
        return values


class LogitsCapture(LogitsProcessor):  # type: ignore[misc]
    """Copies logits out as they pass; changes nothing. Bind a destination with `into` before handing it to vLLM."""

    rows: Rows

    @classmethod
    def into(cls, rows: Rows) -> type["LogitsCapture"]:
        return type(cls.__name__, (cls,), {"rows": rows})

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._batch: dict[int, str] = {}

    def is_argmax_invariant(self) -> bool:
        return False  # vLLM skips argmax-invariant processors for greedy requests, and ours are greedy

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._batch.pop(index, None)
        for index, params, _prompt, _output in batch_update.added:
            self._batch[index] = (params.extra_args or {}).get(REQUEST_KEY, "")
        for first, second, direction in batch_update.moved:
            moved, displaced = self._batch.pop(first, None), self._batch.pop(second, None)
            if moved is not None:
                self._batch[second] = moved
            if displaced is not None and direction is MoveDirectionality.SWAP:
                self._batch[first] = displaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.rows.write(self._batch, logits)
        return logits
