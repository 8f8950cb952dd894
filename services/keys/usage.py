"""Who used how much: read from the database of the keys, whether the service runs or not."""

from pydantic import BaseModel, ConfigDict

from services.keys.database import Database
from services.keys.records import Share, Usage
from services.keys.store import KeyStore, subject_of


class KeyUsage(BaseModel):
    """What one key used; the configuration's own keys (`http.api_keys`) have no owner and no share."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    owner: str
    share: Share
    usage: Usage


def used_by_key(place: str) -> list[KeyUsage]:
    """Every key that there is or that used something, the oldest first.

    Raises:
        KeysUnavailable: the database cannot be read.
    """
    store = KeyStore(Database(place, create=False))
    accounts, usages = store.accounts(), store.usages()
    used = [
        KeyUsage(id=each.key.id, name=each.key.name, owner=each.key.owner, share=each.share, usage=each.usage)
        for each in accounts
    ]
    known = {subject_of(each.key) for each in accounts}
    others = [subject for subject in sorted(usages) if subject.startswith("key:") and subject not in known]
    names = [subject.removeprefix("key:") for subject in others]
    return used + [
        KeyUsage(id=name, name=name, owner="", share=Share(), usage=usages[subject])
        for name, subject in zip(names, others, strict=True)
    ]
