"""Reports the usage of keys from their database. The service need not run."""

from pydantic import BaseModel, ConfigDict

from privmix.database.service import ServiceDatabase
from privmix.keys.records import KeyAccount, Share, ShareUsage
from privmix.keys.store import KeyStore
from privmix.keys.subjects import key_subject, split


class KeyUsage(BaseModel):
    """Reports the usage of one key. Keys of the configuration (`http.api_keys`) have no owner and no share."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    owner: str
    share: Share
    usage: ShareUsage


def usage_by_key(place: str, ensemble: str | None = None) -> list[KeyUsage]:
    """Returns the usage of every key that exists or used tokens, oldest first.

    Args:
        ensemble: the name of an ensemble with shares of its own. None: all other ensembles together.

    Raises:
        KeysUnavailable: the database cannot be read.
    """
    store = KeyStore(ServiceDatabase(place, create=False))
    usages = _usages(store.usages(), ensemble)
    accounts = {key_subject(account.key): account for account in store.accounts()}
    stored = [
        KeyUsage(
            id=account.key.id,
            name=account.key.name,
            owner=account.key.owner,
            share=_share(account, ensemble),
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


def _share(account: KeyAccount, ensemble: str | None) -> Share:
    if ensemble is None:
        return account.share
    return account.ensembles[ensemble].share if ensemble in account.ensembles else Share()


def _usages(usages: dict[str, ShareUsage], ensemble: str | None) -> dict[str, ShareUsage]:
    """Returns the usage by key and group, of one ensemble or of all ensembles without shares of their own."""
    by_subject = {split(subject): usage for subject, usage in usages.items()}
    if ensemble is not None:
        return {subject: usage for (name, subject), usage in by_subject.items() if name == ensemble}
    rest = {subject: usage for (name, subject), usage in by_subject.items() if name is None}
    for (name, subject), usage in by_subject.items():
        if name is not None and subject in rest:
            rest[subject] -= usage
    return rest
