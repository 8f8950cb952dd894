"""Reports the usage of keys from their database. The service need not run."""

from pydantic import BaseModel, ConfigDict

from privmix.database.service import ServiceDatabase
from privmix.keys.records import Share, ShareUsage
from privmix.keys.store import KeyStore
from privmix.keys.subjects import key_subject


class KeyUsage(BaseModel):
    """Reports the usage of one key. Keys of the configuration (`http.api_keys`) have no owner and no share."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    owner: str
    share: Share
    usage: ShareUsage


def usage_by_key(place: str) -> list[KeyUsage]:
    """Returns the usage of every key that exists or used tokens, oldest first.

    Raises:
        KeysUnavailable: the database cannot be read.
    """
    store = KeyStore(ServiceDatabase(place, create=False))
    usages = store.usages()
    accounts = {key_subject(account.key): account for account in store.accounts()}
    stored = [
        KeyUsage(
            id=account.key.id,
            name=account.key.name,
            owner=account.key.owner,
            share=account.share,
            usage=usages.get(subject, ShareUsage()),
        )
        for subject, account in accounts.items()
    ]
    configured = {
        subject.removeprefix("key:"): usages[subject]
        for subject in sorted(usages)
        if subject.startswith("key:") and subject not in accounts
    }
    return stored + [
        KeyUsage(id=name, name=name, owner="", share=Share(), usage=usage) for name, usage in configured.items()
    ]
