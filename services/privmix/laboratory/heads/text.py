"""Embeds text as features, the mean hidden states of the public language model, so that heads can learn labels.

The public model was not trained on the private text, and the features of a row depend on that row and on public
sentences alone. So the head's guarantee covers the text on which it was trained.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from privmix.foundation.errors import DataError
from privmix.foundation.progress import Display
from privmix.laboratory.heads.data import labelled_rows
from privmix.laboratory.heads.table import Table, owners
from privmix.training.private_base import resolve_public

FEATURES = 32
"""The number of components of a random projection with fixed signs, small enough for a small model."""
_TOKENS = 128
"""The maximum number of tokens of a text; the rest is ignored."""

# Public sentences of many kinds, which say where the features of a model lie and how widely. They belong to the
# features: after a change, old heads would read new texts wrongly.
_REFERENCE = (
    "The meeting moves to Thursday at three, in the small room on the second floor.",
    "Patient reports mild headache since yesterday evening, no fever, takes paracetamol.",
    "My order has not arrived yet. Could you tell me where it is?",
    "Fix the crash when the configuration file is empty.",
    "Thanks a lot, that worked!",
    "The river rises in the hills and flows past three villages before it reaches the sea.",
    "What time does the last train to the airport leave?",
    "Add a test for the parser and remove the unused import.",
    "I was charged twice for the same month, please refund one payment.",
    "Blood pressure 130 over 85, pulse regular, lungs clear. Follow-up in two weeks.",
    "To make the dough, mix flour, water and salt, and let it rest for an hour.",
    "She closed the door quietly and looked out at the empty street.",
    "The committee approved the budget with nine votes to four.",
    "Error 504: the server did not answer within thirty seconds.",
    "Can we talk tomorrow? I am in a meeting until five.",
    "The contract may be ended by either party with a notice of three months.",
    "Our team won the match in the last minute, and everybody sang on the way home.",
    "The new version is faster, but it needs more memory than before.",
    "Please send me the signed form by Friday.",
    "Prices rose by two percent in March, less than economists had expected.",
    "He speaks three languages and plays the cello.",
    "Update the documentation of the command-line options.",
    "My password does not work any more, and the reset link has expired.",
    "The museum is closed on Mondays and on public holidays.",
    "No allergies known. Family history of diabetes on the mother's side.",
    "It was a bright cold morning, and the clocks were striking seven.",
    "The experiment was repeated with twice the dose and gave the same result.",
    "Who is responsible for the heating in this building?",
    "Great service, friendly staff, and the soup was excellent.",
    "The function returns the number of bytes that were written, or minus one.",
    "We regret to inform you that your application was not successful.",
    "Turn left after the bridge and follow the road for two miles.",
)
# A feature is 1 at this many of the reference's standard deviations above its mean.
_SPREAD = 3.0


def embed(
    texts: Sequence[str],
    model: str | None = None,
    display: Display | None = None,
) -> NDArray[np.float32]:
    """Returns mean last hidden states, projected, and centred and scaled by public sentences: float32 [n, FEATURES].

    The features lie in [-1, 1]. Every text is embedded alone, so no text changes a bit of another one's features.

    Args:
        texts: the texts to embed.
        model: the public model (see `public_model.resolve`).
    """
    from transformers import AutoModel, AutoTokenizer

    path, shown = resolve_public(model, "model"), display or Display()
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoder = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(encoder.config.hidden_size, FEATURES))

    @torch.no_grad()
    def project(text: str) -> NDArray[np.float64]:
        ids = tokenizer(text, truncation=True, max_length=_TOKENS, split_special_tokens=True)["input_ids"] or [
            tokenizer.eos_token_id
        ]
        state = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0).double().numpy()
        return np.asarray((state - state.mean()) / (state.std() + 1e-9) @ signs)

    reference = np.stack([project(text) for text in _REFERENCE])
    centre, scale = reference.mean(axis=0), _SPREAD * reference.std(axis=0)
    rows = []
    for number, text in enumerate(texts, start=1):
        rows.append(np.clip((project(text) - centre) / scale, -1.0, 1.0))
        shown.show({"texts": number / len(texts)})
    return np.asarray(rows, dtype=np.float32)


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
