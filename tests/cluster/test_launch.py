"""Claim: a deployment refuses a wrong ensemble, model, ledger or port with a clear message before it serves."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from privmix.foundation.errors import (
    ConfigurationError,
    CoordinatorUnavailable,
    LedgerMismatch,
    ManifestError,
    WorkError,
)
from privmix.foundation.ray_session import connected
from privmix.training.manifest import Manifest
from privmix_cluster.checks import check_ensemble
from privmix_cluster.configuration import Configuration
from privmix_cluster.ensemble_actors import wait_until_healthy
from privmix_cluster.launch import APPLICATION, launch
from tests.running import configure, free_port, own_ensemble


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with connected():
        yield


@pytest.fixture
def spoilable(ensemble: Path, tmp_path: Path) -> Path:
    return own_ensemble(ensemble, tmp_path)


def load(folder: Path, ensemble: Path, **sections: dict[str, Any]) -> Configuration:
    return Configuration.load(configure(folder, ensemble, **sections))


def test_an_adapter_that_is_not_the_manifests_is_refused(spoilable: Path, tmp_path: Path) -> None:
    weights = spoilable / "parts" / "part-002" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ManifestError, match="part-002"):
        launch(load(tmp_path, spoilable))


def test_a_model_that_the_engine_does_not_run_is_refused(spoilable: Path, public_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(public_model, tmp_path / "model", copy_function=os.symlink)
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").unlink()  # it is a link
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ConfigurationError, match=r"type gpt2 .* set engine\.kind to transformers"):
        check_ensemble(load(tmp_path, spoilable).model_copy(update={"model": str(model)}))


@pytest.mark.parametrize(
    ("privacy", "separate"),
    [
        ({"protocol": "individual"}, True),
        ({"protocol": "adapmixed", "enforce": "measured"}, True),
        ({"protocol": "exponential"}, False),
    ],
)
def test_another_partition_gives_nobody_a_second_account(
    spoilable: Path, tmp_path: Path, privacy: dict[str, Any], separate: bool
) -> None:
    """A user whose part has spent its account would be in a part with another account after another partition."""
    configuration = load(tmp_path, spoilable, privacy=privacy)
    begun = check_ensemble(configuration, may_begin=True)
    manifest = Manifest.load(spoilable)
    for fewer in ({"parts": manifest.parts[:-1]}, {"salt_id": "another"}):
        manifest.model_copy(update=fewer).save(spoilable)
        if separate:
            with pytest.raises(LedgerMismatch, match=r"partition is .* train the ensemble with the ledger's salt"):
                check_ensemble(configuration)
        else:
            assert check_ensemble(configuration).promise.terms == begun.promise.terms
    manifest.save(spoilable)
    assert check_ensemble(configuration).promise.terms == begun.promise.terms


def test_an_ensemble_that_cannot_be_written_needs_another_anchor(
    spoilable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privmix_cluster.checks.is_writable", lambda directory: directory != spoilable)
    with pytest.raises(ConfigurationError, match=r"budget\.anchor: .* cannot be written"):
        check_ensemble(load(tmp_path, spoilable))
    (tmp_path / "anchors").mkdir()
    configuration = load(tmp_path, spoilable, budget={"anchor": str(tmp_path / "anchors")})
    check_ensemble(configuration, may_begin=True)
    assert list((tmp_path / "anchors").iterdir())


@pytest.mark.usefixtures("cluster")
def test_a_port_that_is_taken_ends_the_start(spoilable: Path, tmp_path: Path) -> None:
    """Also one of another service, whose proxy would share it: its clients' requests would reach this one."""
    port = free_port()
    configuration = load(tmp_path, spoilable, http={"port": port})
    refusal = pytest.raises(ConfigurationError, match=rf"http\.port: cannot listen on 127\.0\.0\.1:{port}")
    with socket.create_server(("127.0.0.1", port), reuse_port=True), refusal:
        launch(configuration)
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] != "serve"]


@serve.deployment
class Failing:
    def __init__(self) -> None:
        raise ValueError("no route")


@pytest.mark.usefixtures("cluster")
def test_a_start_that_fails_leaves_no_route(spoilable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privmix_cluster.launch.start_actors", lambda *_, **__: {})
    monkeypatch.setattr("privmix_cluster.launch.gateway", lambda *_, **__: Failing.bind())  # type: ignore[attr-defined]
    with pytest.raises(WorkError, match="route could not be opened: Deploying"):
        launch(load(tmp_path, spoilable))
    while APPLICATION in serve.status().applications:
        time.sleep(0.1)


@serve.deployment
class Other:
    def __call__(self) -> str:
        return "other"


@pytest.mark.usefixtures("cluster")
def test_a_second_service_of_a_cluster_leaves_the_first_ones_route(
    spoilable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray cluster has one route: its clients would reach the corpus of the second."""
    monkeypatch.setattr("privmix_cluster.launch.start_actors", lambda *_, **__: {})
    configuration = load(tmp_path, spoilable)
    serve.shutdown()
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=configuration.http.port))
    first = serve.run(Other.bind(), name=APPLICATION)  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="this Ray cluster serves privmix already"):
        launch(configuration)
    assert serve.status().applications[APPLICATION].status == "RUNNING"
    assert first.remote().result() == "other"
    serve.delete(APPLICATION)


@pytest.mark.usefixtures("cluster")
def test_a_service_listens_where_its_configuration_says(
    spoilable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve ignores the options of a second start: the address of an earlier service, say of the whole network."""
    serve.shutdown()
    earlier, port = free_port(), free_port()
    serve.start(http_options=HTTPOptions(host="0.0.0.0", port=earlier))
    serve.run(Other.bind(), name="other")  # type: ignore[attr-defined]
    configuration = load(tmp_path, spoilable, http={"port": port})
    with pytest.raises(ConfigurationError, match=rf"Serve of this cluster listens on 0\.0\.0\.0:{earlier} for other;"):
        launch(configuration)
    serve.delete("other")
    found = set[Any]()

    def fail(*_: object) -> None:
        for child in psutil.Process().children(recursive=True):
            found.update(each.laddr for each in child.net_connections() if each.status == psutil.CONN_LISTEN)
        raise WorkError("no shard could be started")

    monkeypatch.setattr("privmix_cluster.launch.start_actors", fail)
    with pytest.raises(WorkError, match="no shard could be started"):
        launch(configuration)
    assert ("127.0.0.1", port) in found
    assert earlier not in {address.port for address in found}


class Busy:
    """A coordinator whose shard misses the first answers."""

    def __init__(self, misses: int) -> None:
        self._misses = misses

    def health(self) -> None:
        self._misses -= 1
        if self._misses >= 0:
            raise CoordinatorUnavailable("a part group is not served: the actor 'shard-000' does not answer within 3 s")


BusyActor = ray.remote(num_cpus=0)(Busy)


@pytest.mark.usefixtures("cluster")
def test_a_shard_that_misses_one_answer_does_not_end_a_start() -> None:
    coordinators = [BusyActor.remote(1), BusyActor.remote(0)]
    # The patience is for answers, not for the start of processes.
    ray.get([coordinator.__ray_ready__.remote() for coordinator in coordinators])
    wait_until_healthy(coordinators)


@pytest.mark.usefixtures("cluster")
def test_a_shard_that_never_answers_ends_a_start_with_its_reason() -> None:
    with pytest.raises(WorkError, match=r"did not become healthy: a part group is not served: the actor 'shard-000'"):
        wait_until_healthy([BusyActor.remote(1000)], patience_s=1.5)
