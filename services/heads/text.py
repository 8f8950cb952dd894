"""Embeds text as features, the mean hidden states of the public language model, so that heads can learn labels.

The public model was not trained on the private text, and the features of a row depend on that row alone. So the head's
guarantee covers the text on which it was trained.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.heads.data import DataError, Table, labelled_rows, owners
from services.progress import Display
from services.training import public_model

# The number of components of a fixed random projection, small enough for a small model.
FEATURES = 32


def embed(
    texts: Sequence[str],
    model: str | None = None,
    tokens: int = 128,
    features: int = FEATURES,
    display: Display | None = None,
) -> NDArray[np.float32]:
    """Returns mean last hidden states, each normalised and projected to [-1, 1]: float32 [n, features].

    Every text is embedded alone, so that no text changes the rounding of another one's features.

    Args:
        texts: the texts to embed.
        model: the public model (see `public_model.resolve`).
        tokens: the maximum number of tokens of a text; the rest is ignored.
        features: the dimension of the random projection, whose signs have a fixed seed.
    """
    from transformers import AutoModel, AutoTokenizer

    path, shown = public_model.resolve(model), display or Display()
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoder = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for number, text in enumerate(texts, start=1):
            ids = tokenizer(text, truncation=True, max_length=tokens)["input_ids"] or [tokenizer.eos_token_id]
            rows.append(encoder(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy())
            shown.show({"texts": number / len(texts)})
    means = np.stack(rows).astype(np.float64)
    means = (means - means.mean(axis=1, keepdims=True)) / (means.std(axis=1, keepdims=True) + 1e-9)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(means.shape[1], features))
    # A product with one row at a time: its rounding depends on no other row.
    scaled = np.stack([row @ signs for row in means]) / means.shape[1] ** 0.5 / 3
    return np.asarray(np.clip(scaled, -1.0, 1.0), dtype=np.float32)


def text_table(
    texts: Sequence[str],
    labels: Sequence[int],
    users: Sequence[str] | None = None,
    model: str | None = None,
    display: Display | None = None,
) -> Table:
    """Returns a table of embedded texts. The scaling of a row does not depend on other rows, so it is public.

    Raises:
        DataError: the texts and labels do not match.
    """
    if len(texts) != len(labels):
        raise DataError(f"text: {len(texts)} texts and {len(labels)} labels")
    return Table(
        "text",
        embed(texts, model, display=display),
        np.asarray(labels, dtype=np.float32),
        np.arange(len(texts)) if users is None else owners(users),
        "public",
        "record" if users is None else "user",
    )


def read_texts(
    source: str,
    *,
    text: str,
    target: str,
    user: str | None = None,
    model: str | None = None,
    display: Display | None = None,
) -> Table:
    """Reads labelled texts and embeds them.

    Args:
        source: a JSON Lines, CSV or Parquet file, a directory of Hugging Face `datasets`, or a hub id.
        text: the column of the text.
        target: the column of the label, with two values, as in `data.read_table`.
        user: the column of the row's owner; by default each row has its own owner.
        model: the public model (see `public_model.resolve`).

    Raises:
        DataError: the source cannot be read, or a column is invalid. The message names it.
    """
    frame, labels = labelled_rows(source, target, (text, user))
    if frame[text].isna().any():
        raise DataError(f"{source}: column {text!r} has rows without a text; leave them out")
    users = None if user is None else frame[user].astype(str).tolist()
    return text_table(frame[text].astype(str).tolist(), labels.astype(int).tolist(), users, model, display)
