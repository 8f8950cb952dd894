"""Claim: the protocol of a configuration keeps to its budget up to the last token."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from privmix.budget.ledger import Ledger
from privmix.budget.reading import check
from privmix.foundation.errors import LedgerMismatch, LedgerMissing
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.pmixed import PMixed
from privmix.training.manifest import Manifest
from privmix_cluster.configuration import Configuration
from privmix_cluster.promise import promise
from tests import postgresql as postgresql_server
from tests.running import configure


def configured(folder: Path, ensemble: Path, **privacy: Any) -> Configuration:
    return Configuration.load(configure(folder, ensemble, privacy=privacy))


def test_the_ledgers_order_and_counter_stay_when_the_configuration_changes(ensemble: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(ensemble)
    first = promise(configured(tmp_path, ensemble, tokens=1000), manifest)
    Ledger.create(tmp_path / "ledger.db", first.terms)
    changed = promise(configured(tmp_path, ensemble, tokens=50, q=0.1), manifest)
    assert changed.terms == first.terms
    assert isinstance(changed.protocol, PMixed)
    assert isinstance(first.protocol, PMixed)
    assert changed.protocol.radius != first.protocol.radius


def test_a_database_without_a_ledger_is_where_one_begins(
    ensemble: Path, tmp_path: Path, postgresql: postgresql_server.Server
) -> None:
    url = postgresql.database()
    path = configure(tmp_path, ensemble, privacy={"tokens": 1000}, budget={"ledger": url})
    configuration, manifest = Configuration.load(path), Manifest.load(ensemble)
    first = promise(configuration, manifest)
    with pytest.raises(LedgerMissing):
        check(url, first.terms)
    Ledger.create(url, first.terms)
    check(url, first.terms)
    assert promise(configuration, manifest).terms == first.terms
    with pytest.raises(LedgerMismatch, match="delta"):
        check(url, first.terms.model_copy(update={"delta": 1e-7}))


@pytest.mark.parametrize("name", [name for name, settings in PROTOCOLS.items() if not settings.one_model])
def test_the_fleet_serves_what_was_promised(ensemble: Path, tmp_path: Path, name: str) -> None:
    """The fleet plans again when parts join or leave, at the order in the ledger."""
    path = tmp_path / "privmix.yaml"
    path.write_text(yaml.safe_dump({"ensemble": str(ensemble), "privacy": {"protocol": name, "tokens": 500}}))
    configuration = Configuration.load(path)
    promised = promise(configuration, Manifest.load(ensemble))
    assert promised.settings.plan(promised.protocol.parts, promised.terms.accountant) == promised.protocol
    assert promised.sentence
