"""Checks a configuration, its ensemble and its ledger before anything starts; creates the ledger of a new ensemble."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from privmix.budget.anchor import is_writable
from privmix.budget.reading import read
from privmix.budget.receipt import begin, is_fresh, verified_ledger_id
from privmix.database.service import ServiceDatabase, default_database
from privmix.engine import VLLM_FAMILIES
from privmix.foundation.errors import ConfigurationError, LedgerMissing, LedgerUnknown
from privmix.gateway.settings import ServedEnsemble
from privmix.keys.store import KeyStore
from privmix.training.manifest import Manifest
from privmix.training.public_model import read_config, resolve
from privmix_cluster.configuration import Configuration
from privmix_cluster.promise import Promise, promise

LOOPBACK = ("127.0.0.1", "::1", "localhost")

Report = Callable[[str], None]


def check_keys(configuration: Configuration, report: Report = lambda step: None, *, listens: bool = True) -> None:
    """Checks that a service without keys accepts only local clients, unless `http.anonymous` allows others.

    Args:
        listens: whether the service listens on `http.host`. Otherwise Ray Serve's configuration has the address, which
            is not known here, so only a warning is reported.

    Raises:
        ConfigurationError: other machines could use the service without a key, or the service had keys and they are
            gone.
        KeysError: the keys' database cannot be opened.
        LedgerError: the ledger cannot be read.
    """
    http, database = configuration.http, ServiceDatabase(keys_database(configuration))
    if KeyStore(database).required():
        return
    if _had_keys(configuration):
        raise ConfigurationError(
            f"keys.database: this service had keys, but {database.name} has none, so everybody could use it: set "
            "keys.database to the database that has them, or restore it"
        )
    if http.api_keys:
        return
    if listens and http.host not in LOOPBACK and not http.anonymous:
        raise ConfigurationError(
            f"http.host: {http.host} lets other machines in, and there are no keys. Create one "
            f"(privmix keys create NAME --database {database.name}), listen on 127.0.0.1, or set http.anonymous: true"
        )
    report("WARNING: there are no keys: every client that reaches this service can spend its privacy budget")


def _had_keys(configuration: Configuration) -> bool:
    """Returns whether the ensemble's ledger records that clients needed keys."""
    with suppress(LedgerMissing):
        return read(configuration.budget.ledger).clients_needed_keys
    return False


def keys_database(configuration: Configuration) -> str:
    """Returns the path or the URL of the keys' database."""
    return configuration.keys.database or default_database(configuration.budget.ledger)


@dataclass(frozen=True)
class CheckedEnsemble:
    """Holds an ensemble that matches its manifest, its planned protocol, and the id of its ledger."""

    configuration: Configuration
    manifest: Manifest
    model: Path
    promise: Promise
    ledger: str

    @property
    def served(self) -> ServedEnsemble:
        """The record of this ensemble for the gateways."""
        configuration = self.configuration
        coordinator = configuration.coordinator
        return ServedEnsemble(
            names=configuration.http.served_model_names,
            namespace=configuration.namespace,
            model=self.model,
            context_length=configuration.engine.context_length,
            coordinators=coordinator_names(configuration),
            capacity=coordinator.max_live * coordinator.replicas,
            max_waiting=coordinator.max_waiting * coordinator.replicas,
            private_base=self.manifest.private_base is not None,
            recovery_s=coordinator.recovery_s,
            # A step can hang until its timeout; then streams wait for the recovery, and the next step can hang too.
            stall_timeout_s=coordinator.recovery_s + 2 * coordinator.step_timeout_s,
        )


def check_ensemble(
    configuration: Configuration, report: Report = lambda step: None, *, may_begin: bool = False
) -> CheckedEnsemble:
    """Verifies an ensemble, its public model, its protocol and its ledger before anything starts.

    Args:
        may_begin: create the ledger of an ensemble that never had one.

    Raises:
        ManifestError, PublicModelError, LedgerError, ConfigurationError: the message says what is wrong and how to fix
            it.
    """
    report("Checking the ensemble against its manifest")
    manifest = Manifest.load(configuration.ensemble)
    model = resolve(configuration.model or manifest.base_model)
    kind = read_config(model).get("model_type")
    if configuration.engine.kind == "vllm" and kind not in VLLM_FAMILIES:
        raise ConfigurationError(
            f"model {model}: vLLM does not run models of the type {kind} (config.json) with parts; set engine.kind to "
            f"transformers, or train on one of {', '.join(VLLM_FAMILIES)}"
        )
    manifest.verify(configuration.ensemble, model)
    promised = promise(configuration, manifest)
    report(promised.sentence)
    if manifest.part_kind == "lora" and len(manifest.parts) > 1:
        report("WARNING: plain LoRA: for a token a shard makes a pass and keeps a cache for each part, and one more")
    return CheckedEnsemble(
        configuration, manifest, model, promised, _ledger_of(configuration, promised, report, may_begin)
    )


def coordinator_names(configuration: Configuration) -> tuple[str, ...]:
    """Returns the names of the coordinators' actors."""
    return ("coordinator", *(f"coordinator-{number}" for number in range(1, configuration.coordinator.replicas)))


def _ledger_of(configuration: Configuration, promised: Promise, report: Report, may_begin: bool) -> str:
    """Returns the id of the ensemble's ledger. An ensemble has only one, because a second would not count its charges.

    Raises:
        ConfigurationError: the ledger is missing or unknown, or no place stores the end of its chain.
    """
    settings, terms, ensemble = configuration.budget, promised.terms, configuration.ensemble
    if settings.anchor is None and not is_writable(ensemble):
        raise ConfigurationError(
            f"budget.anchor: {ensemble} cannot be written, so nothing outside the database would show whether the "
            "ledger lost rows, and nothing is granted: set budget.anchor to a directory, or make the "
            "ensemble's directory writable"
        )
    try:
        if may_begin and is_fresh(settings.ledger, ensemble):
            receipt = begin(settings.ledger, terms, ensemble, anchor=settings.anchor, key=settings.key())
            report(f"Created ledger {receipt.place} with id {receipt.ledger}")
            return receipt.ledger
        return verified_ledger_id(settings.ledger, terms, ensemble, settings.anchor)
    except (LedgerMissing, LedgerUnknown) as error:
        raise ConfigurationError(f"budget.ledger: {error}") from error
