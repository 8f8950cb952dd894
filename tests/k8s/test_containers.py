"""Claim: the image builds, and the pods of the overlays run in containers as Kubernetes and KubeRay start them."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from tests.ensembles import write_ensemble
from tests.k8s.containers import Machine, Pod, build, machine, ray_environment, start_command, unavailable, until
from tests.k8s.manifests import Manifests, render, with_components
from tests.postgresql import Server
from tests.tiny import write_served_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

IMAGE, KEY, PASSWORD = "localhost/privmix:test", secrets.token_hex(16), secrets.token_hex(16)
START_S = 300.0
ASKED = {"model": "privmix", "prompt": "Caller: Hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    build(IMAGE, tmp_path_factory.mktemp("image"))
    return IMAGE


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return render("cpu-dev")


@pytest.fixture(scope="module")
def pods(image: str, manifests: Manifests, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Volumes with a model and, later, an ensemble; no ledger yet."""
    values = {**yaml.safe_load(manifests.configuration()), "model": "/models/base"}
    stored = {"privmix-api-keys": {"api-keys": json.dumps([KEY])}}
    with machine(tmp_path_factory.mktemp("pods"), manifests, image, stored, yaml.safe_dump(values)) as made:
        write_served_model(made.volume("privmix-models") / "base", 1024)
        made.own()
        yield made


@pytest.fixture(scope="module")
def head(pods: Machine, manifests: Manifests) -> Pod:
    """The head's pod, whose containers have not started."""
    pod = pods.pod("privmix-head-svc", manifests.pods()[0])
    pod.arguments = [*pod.arguments, *ray_environment("127.0.0.1")]
    return pod


def check(pod: Pod, image: str) -> str:
    """Runs what the head's init container repeats; returns its last line, empty once it passes."""
    (container,) = pod.template["spec"]["initContainers"]
    repeated = container["args"][0]
    command = repeated.removeprefix("until ").partition(";")[0].split()
    ran = pod.run(image, command, check=False)
    return ran.stderr.strip().splitlines()[-1] if ran.returncode else ""


def deploy(head: Pod, manifests: Manifests, image: str) -> None:
    """Starts the head and gives it the application, as KubeRay does."""
    head.start(image, start_command(manifests.cluster["headGroupSpec"], None))
    until(lambda: head.get("/api/healthz", 52365)[0] == 200, START_S, head.logs)
    submit(head, manifests)
    until(lambda: head.get("/health", 8000, key=KEY)[0] == 200, START_S, head.logs)


def submit(head: Pod, manifests: Manifests) -> None:
    """Gives Serve its configuration, as KubeRay does."""
    application = json.dumps(manifests.serve_config())
    deployed = head.execute("sh", "-c", f"cat > /tmp/serve.json <<'X'\n{application}\nX\nserve deploy /tmp/serve.json")
    assert deployed.returncode == 0, deployed.stderr


def charged(head: Pod) -> int:
    status, text = head.get("/v1/privacy", 8000, key=KEY)
    assert status == 200, text
    count: int = json.loads(text)["tokens_charged"]
    return count


def test_a_start_waits_until_its_ensemble_and_its_ledger_are_there(
    pods: Machine, head: Pod, image: str, tmp_path: Path
) -> None:
    assert "/ensembles/first" in check(head, image)
    model = pods.volume("privmix-models") / "base"
    write_ensemble(pods.volume("privmix-ensembles") / "first", 2, model=model)
    pods.own()
    assert "privmix ledger init" in check(head, image)
    job = with_components("cpu-dev", tmp_path, "ledger-init-sqlite").one("Job", "privmix-ledger-init")
    template = job["spec"]["template"]
    created = pods.pod("ledger-init", template).run(image, template["spec"]["containers"][0]["command"], check=False)
    assert created.returncode == 0, created.stderr
    assert check(head, image) == ""


def test_the_service_answers_and_its_ledger_outlives_the_head(head: Pod, manifests: Manifests, image: str) -> None:
    deploy(head, manifests, image)
    assert head.get("/v1/completions", 8000, body=ASKED)[0] == 401
    status, text = head.get("/v1/completions", 8000, key=KEY, body=ASKED)
    assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 4, text
    assert {head.get(path, 8000)[0] for path in ("/livez", "/readyz")} == {200}
    assert head.execute("privmix", "status").returncode == 0
    before = charged(head)
    assert before >= 4

    head.kill()
    deploy(head, manifests, image)
    assert charged(head) >= before
    assert head.get("/v1/completions", 8000, key=KEY, body=ASKED)[0] == 200


def test_the_cron_jobs_own_script_backs_the_ledger_up(
    pods: Machine, head: Pod, manifests: Manifests, image: str
) -> None:
    template = manifests.one("CronJob", "privmix-backup")["spec"]["jobTemplate"]["spec"]["template"]
    container = template["spec"]["containers"][0]
    pod = pods.pod("backup", template)
    ran = pod.run(image, [*container["command"], *container.get("args", ())], check=False)
    assert ran.returncode == 0, ran.stderr
    (copy,) = pods.volume("privmix-backup").glob("first-*.db")
    restored = pods.volume("privmix-backup") / "restored.db"
    pod.run(image, ["sh", "/scripts/restore.sh", f"/backup/{copy.name}", f"/backup/{restored.name}"])
    assert pod.run(image, ["privmix", "ledger", "verify", f"/backup/{restored.name}"]).returncode == 0


@pytest.fixture
def large(image: str, postgresql: Server, tmp_path: Path) -> Iterator[Machine]:
    """Volumes for `gpu-ha`, with an ensemble and its ledger in PostgreSQL. Five CPUs stand for a worker's GPU."""
    manifests = render("gpu-ha")
    values = {**yaml.safe_load(manifests.configuration()), "model": "/models/base"}
    values["shards"] |= {"num_gpus": 0, "num_cpus": 5, "copies": 2}
    values["engine"]["cache_gib"] = 0.5
    database = conninfo_to_dict(postgresql.database())["dbname"]
    postgresql.folder.chmod(0o755)  # the pods' user reaches the server's socket in it
    stored = {
        "privmix-api-keys": {"api-keys": json.dumps([KEY])},
        "privmix-ledger": {"url": f"postgresql://postgres:{PASSWORD}@/{database}?host=/run/postgresql"},
    }
    with machine(tmp_path / "pods", manifests, image, stored, yaml.safe_dump(values)) as pods, pods.redis(PASSWORD):
        model = pods.volume("privmix-models") / "base"
        write_served_model(model, 2048)
        write_ensemble(pods.volume("privmix-ensembles") / "first", 2, model=model)
        pods.own()
        job = with_components("gpu", tmp_path / "k8s", "ledger-init").one("Job", "privmix-ledger-init")
        template = job["spec"]["template"]
        begins = pods.pod("ledger-init", template)
        begins.arguments = [*begins.arguments, socket_of(postgresql)]
        begun = begins.run(image, template["spec"]["containers"][0]["command"], check=False)
        assert begun.returncode == 0, begun.stderr
        yield pods


def socket_of(server: Server) -> str:
    """Returns the option of podman with which a pod reaches a PostgreSQL server of this machine."""
    return f"--volume={server.folder}:/run/postgresql"


class RayCluster:
    """The pods of one Ray cluster of `gpu-ha`, as KubeRay starts them; the head's host is `name`."""

    def __init__(self, pods: Machine, server: Server, image: str, name: str, workers: int) -> None:
        self.image, (self._group,) = image, pods.manifests.workers
        redis = pods.manifests.cluster["gcsFaultToleranceOptions"]["redisAddress"]
        kept = {"RAY_REDIS_ADDRESS": redis, "REDIS_PASSWORD": PASSWORD, "RAY_external_storage_namespace": name}
        patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
        self._head_group = pods.manifests.cluster["headGroupSpec"]
        self.head = pods.pod(name, pods.manifests.pods()[0], {"privmix-redis": pods.address})
        self.head.arguments = [*self.head.arguments, *ray_environment("127.0.0.1", **kept), socket_of(server)]
        hosts = {name: self.head.address}
        self.workers = [pods.pod(f"{name}-worker-{n}", pods.manifests.pods()[1], hosts) for n in range(workers)]
        for worker in self.workers:
            worker.arguments = [*worker.arguments, *ray_environment(name, **patience)]

    def start_head(self) -> None:
        command = start_command(self._head_group, None, **{"redis-password": "$REDIS_PASSWORD"})
        self.head.start(self.image, command)
        until(lambda: self.head.get("/api/healthz", 52365)[0] == 200, START_S, self.head.logs)

    def start_worker(self, number: int) -> Pod:
        worker = self.workers[number]
        worker.start(self.image, start_command(self._group, self.head.name))
        return worker

    def scale(self, copies: int) -> None:
        scaled = self.head.execute("privmix", "scale", "--copies", str(copies), "--json", check=False)
        assert scaled.returncode == 0, scaled.stderr
        assert json.loads(scaled.stdout)["copies"] == copies

    def serves(self, number: int) -> None:
        """Waits until a worker is ready, and answers."""
        worker, probe = self.workers[number], self._group["template"]["spec"]["containers"][0]["readinessProbe"]
        until(lambda: worker.get(probe["httpGet"]["path"], 8000)[0] == 200, START_S, worker.logs)
        until(lambda: answers(worker), START_S, worker.logs)


def test_a_cluster_grows_loses_its_pods_and_is_followed_by_another(
    large: Machine, postgresql: Server, image: str
) -> None:
    """The pods of `gpu-ha` with three workers: Redis and PostgreSQL outlive the head."""
    first = RayCluster(large, postgresql, image, "privmix-head-svc", 3)
    first.start_head()
    for number in range(2):
        first.start_worker(number)
    submit(first.head, large.manifests)
    for number in range(2):
        first.serves(number)
        worker = first.workers[number]
        shown = worker.execute("sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline").stdout
        assert worker.execute("ls", "/secrets", check=False).returncode
        assert "RAY_AUTH_MODE" in shown
        assert not {word for word in (KEY, PASSWORD) if word in shown}

    first.start_worker(2)  # as the autoscaler does, because a copy waits
    first.scale(3)
    first.serves(2)

    first.workers[0].kill()
    until(lambda: answers(first.workers[1]), START_S, first.workers[1].logs)
    first.start_worker(0)
    first.serves(0)

    before = charged(first.workers[1])
    first.head.kill()
    until(lambda: not answers(first.workers[1]), START_S, first.workers[1].logs)
    assert first.workers[1].get("/v1/completions", 8000, key=KEY, body=ASKED)[0] == 503
    first.start_head()
    for number in range(3):
        first.serves(number)
    assert charged(first.workers[1]) > before

    first.scale(1)
    second = RayCluster(large, postgresql, image, "privmix-next-head-svc", 1)
    second.start_head()
    second.start_worker(0)
    submit(second.head, large.manifests)
    until(lambda: second.workers[0].get("/readyz", 8000)[0] == 200, START_S, second.head.logs)
    assert any(map(answers, first.workers)), "until the next cluster charges"
    second.serves(0)
    assert "another deployment has the ledger" in "".join(worker.get("/health", 8000)[1] for worker in first.workers)
    assert charged(second.workers[0]) > before


def answers(pod: Pod) -> bool:
    return pod.get("/v1/completions", 8000, key=KEY, body=ASKED)[0] == 200
