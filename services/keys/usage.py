"""Who used how much: read from the database of the keys, whether the service runs or not."""

from pydantic import BaseModel, ConfigDict

from services.keys.database import Database
from services.keys.records import Share, Usage
from services.keys.store import KeyStore
from services.keys.subjects import split, subject_of


class KeyUsage(BaseModel):
    """What one key used; the configuration's own keys (`http.api_keys`) have no owner and no share."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    owner: str
    share: Share
    usage: Usage


def used_by_key(place: str, ensemble: str | None = None) -> list[KeyUsage]:
    """Every key that there is or that used something, the oldest first.

    Args:
        ensemble: the name of an ensemble that has shares of its own. None: what was used of all others.

    Raises:
        KeysUnavailable: the database cannot be read.
    """
    store = KeyStore(Database(place, create=False))
    accounts, usages = store.accounts(), _usages(store.usages(), ensemble)
    shares = {
        subject_of(each.key): each.share
        if ensemble is None
        else each.ensembles[ensemble].share
        if ensemble in each.ensembles
        else Share()
        for each in accounts
    }
    used = [
        KeyUsage(
            id=each.key.id,
            name=each.key.name,
            owner=each.key.owner,
            share=shares[subject_of(each.key)],
            usage=usages.get(subject_of(each.key), Usage()),
        )
        for each in accounts
    ]
    others = [subject for subject in sorted(usages) if subject.startswith("key:") and subject not in shares]
    names = [subject.removeprefix("key:") for subject in others]
    return used + [
        KeyUsage(id=name, name=name, owner="", share=Share(), usage=usages[subject])
        for name, subject in zip(names, others, strict=True)
    ]


def _usages(usages: dict[str, Usage], ensemble: str | None) -> dict[str, Usage]:
    """By key and group, what was used of one ensemble; or of all that have no shares of their own."""
    by_subject = {split(subject): usage for subject, usage in usages.items()}
    if ensemble is not None:
        return {subject: usage for (own, subject), usage in by_subject.items() if own == ensemble}
    rest = {subject: usage for (own, subject), usage in by_subject.items() if own is None}
    for (own, subject), usage in by_subject.items():
        if own is not None and subject in rest:
            rest[subject] -= usage
    return rest
