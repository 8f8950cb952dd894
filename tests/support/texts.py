"""Tokenizers, and texts that are hard to decode piece by piece."""

import json
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer

from privmix.coordinator.text import Detokenizer, TextStream
from privmix.training import public_model

TEXTS = (
    "The clinic opens at nine, and closes at five.",
    "  two leading spaces\n\n\tand a tab ",
    "emoji \U0001f600\U0001f468‍\U0001f469‍\U0001f467‍\U0001f466 and flags \U0001f1ec\U0001f1f7!",
    "東京は日本の首都です。中文也可以。한국어도",
    "naïve café — “quotes” … ﷽",
    "a replacement � of its own, and at the end �",
)


@cache
def smollm() -> Detokenizer:
    return Detokenizer.load(public_model.resolve())


@cache
def smollm_tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(public_model.resolve()).backend_tokenizer


@cache
def word_start_tokenizer() -> Tokenizer:
    """Returns a tokenizer like Llama's, with a mark for the start of a word and bytes for unknown characters."""
    mark = "▁"
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["the clinic opens at nine and closes at five every day of the week"] * 20, trainer)
    description = json.loads(tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(description))


@cache
def word_start() -> Detokenizer:
    tokenizer = word_start_tokenizer()
    end = tokenizer.token_to_id("</s>")
    assert end is not None
    return Detokenizer(tokenizer, frozenset({end}))


def ids(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    return (tokenizer or smollm_tokenizer()).encode(text, add_special_tokens=False).ids


def deltas(
    detokenizer: Detokenizer, prompt: Sequence[int], answer: Sequence[int], stop: Sequence[str] = ()
) -> list[str]:
    stream = TextStream(detokenizer, prompt, stop)
    texts = []
    for token in answer:
        texts.append(stream.push(token))
        if stream.stopped:
            return texts
    return [*texts, stream.finish()]


def streamed(detokenizer: Detokenizer, prompt: Sequence[int], answer: Sequence[int], stop: Sequence[str] = ()) -> str:
    return "".join(deltas(detokenizer, prompt, answer, stop))
