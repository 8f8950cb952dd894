"""Claim: the image builds, and the pods of the overlays run in containers as Kubernetes and KubeRay start them.

What the page tells an operator to run is read from the page (`shown`).
"""

import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from tests.ensembles import write_ensemble
from tests.k8s import containers
from tests.k8s.containers import Machine, Pod, build, machine, ray_environment, start_command, unavailable
from tests.k8s.manifests import Manifests, render, secret, shown, with_components
from tests.postgresql import Server
from tests.support import waiting
from tests.tiny import write_served_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

IMAGE, KEY = "localhost/privmix:test", secrets.token_hex(16)
PASSWORD, REDIS_PASSWORD = secrets.token_hex(16), secrets.token_hex(16)
START_S = 600.0
until = partial(waiting.until, pause_s=2.0)
CONFIGURATION = "/etc/privmix/privmix.yaml"
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
    stored = {"privmix-api-keys": secret("privmix-api-keys", {"KEY": KEY})}
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


@pytest.fixture(scope="module")
def ledger_init(pods: Machine, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    return ledger_job(pods, with_components("cpu-dev", tmp_path_factory.mktemp("k8s"), "ledger-init-sqlite"))


def ledger_job(pods: Machine, manifests: Manifests) -> Pod:
    """Returns the pod of the Job for which the page waits."""
    _, name = shown("kubectl -n privmix wait job")[4].split("/")
    return pods.pod("ledger-init", manifests.one("Job", name)["spec"]["template"])


def check(pod: Pod, image: str) -> str:
    """Runs what the head's init container repeats; returns its last line, empty once it passes."""
    (container,) = pod.template["spec"]["initContainers"]
    repeated = container["args"][0]
    command = repeated.removeprefix("until ").partition(";")[0].split()
    ran = pod.run(image, command, check=False)
    return ran.stderr.strip().splitlines()[-1] if ran.returncode else ""


def start(head: Pod, group: Any, image: str, **parameters: str) -> None:
    """Starts the head of a Ray cluster, as KubeRay does, and waits for its probe."""
    head.start(image, start_command(group, None, **parameters))
    until(lambda: head.ask("/api/healthz", port=52365).is_success, START_S, head.logs)


def submit(head: Pod, manifests: Manifests, configuration: str = CONFIGURATION) -> None:
    """Gives Serve its configuration, as KubeRay does."""
    serve = manifests.serve_config()
    assert serve["applications"][0]["args"] == {"config": CONFIGURATION}
    serve["applications"][0]["args"]["config"] = configuration
    head.execute("sh", "-c", f"cat > /tmp/serve.json <<'X'\n{json.dumps(serve)}\nX\nserve deploy /tmp/serve.json")


def deployed(head: Pod) -> Any:
    """Returns the state of the application, once it is a final one."""
    states: list[Any] = []

    def final() -> bool:
        states.append(yaml.safe_load(head.execute("serve", "status").stdout)["applications"]["privmix"])
        return states[-1]["status"] in {"RUNNING", "DEPLOY_FAILED"}

    until(final, START_S, head.logs)
    return states[-1]


def charged(pod: Pod) -> int:
    count: int = pod.ask("/v1/privacy", key=KEY).raise_for_status().json()["tokens_charged"]
    return count


def answers(pod: Pod) -> bool:
    return pod.ask("/v1/completions", key=KEY, body=ASKED).status_code == 200


def actors(head: Pod) -> set[str]:
    """Returns the processes of the actors in a pod."""
    titles = "grep -laE '^ray::.*(Coordinator|Shard|Fleet|Budget)' /proc/[0-9]*/cmdline"
    found = head.execute("sh", "-c", titles, check=False)
    return set(found.stdout.split())


def inherited(pod: Pod) -> str:
    """Returns the environments and arguments of all processes in a pod."""
    return pod.execute("sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline", check=False).stdout


def backup(pods: Machine) -> Pod:
    """Returns the pod of the CronJob."""
    (template,) = (each for each in pods.manifests.job_pods() if "backup" in each["metadata"]["labels"].values())
    return pods.pod("backup", template)


def known(pod: Pod, image: str, ledger: str) -> int:
    """Returns the tokens that a ledger has charged, without a service."""
    count: int = json.loads(pod.run(image, ["privmix", "budget", "--ledger", ledger, "--json"]).stdout)[
        "tokens_charged"
    ]
    return count


def test_a_start_waits_until_its_ensemble_and_its_ledger_are_there(
    pods: Machine, head: Pod, ledger_init: Pod, image: str
) -> None:
    assert "/ensembles/first" in check(head, image)
    model = pods.volume("privmix-models") / "base"
    write_ensemble(pods.volume("privmix-ensembles") / "first", 2, model=model)
    pods.own()
    assert "privmix ledger init" in check(head, image)
    ledger_init.run(image, ledger_init.command)
    assert check(head, image) == ""


def test_the_service_answers_and_its_actors_outlive_a_changed_configuration(
    head: Pod, manifests: Manifests, image: str
) -> None:
    start(head, manifests.cluster["headGroupSpec"], image)
    submit(head, manifests, "/etc/privmix/missing.yaml")
    reason = "Deploying app 'privmix' failed with exception:\n/etc/privmix/missing.yaml: cannot be read"
    assert deployed(head)["message"].startswith(reason)
    submit(head, manifests)
    assert deployed(head)["status"] == "RUNNING"
    assert head.ask("/v1/completions", body=ASKED).status_code == 401
    curl = [*shown("curl", {"KEY": KEY, "privmix-serve-svc.privmix": head.address}), "--http2"]  # `Upgrade: h2c`
    answer = json.loads(subprocess.run(curl, check=True, stdout=subprocess.PIPE).stdout)
    assert answer["usage"]["completion_tokens"] == 32
    assert {head.ask(path).status_code for path in ("/livez", "/readyz", "/health")} == {200}
    head.execute(*shown("privmix status"))
    assert KEY not in inherited(head)

    before = actors(head)
    assert len(before) >= 4
    submit(head, manifests, CONFIGURATION.replace("/privmix.yaml", "/./privmix.yaml"))
    assert deployed(head)["status"] == "RUNNING"
    assert actors(head) == before


def test_a_lost_head_and_ledger_are_replaced_and_the_lost_tokens_charged(
    pods: Machine, head: Pod, ledger_init: Pod, image: str
) -> None:
    copies = backup(pods)
    copies.run(image, copies.command)
    (copy,) = pods.volume("privmix-backup").glob("first-*.db")
    assert answers(head)
    before = charged(head)
    head.kill()
    restore = shown("sh /scripts/restore.sh", {"COPY": copy.stem})
    assert copies.run(image, restore, check=False).returncode, "a ledger is there"
    for file in pods.volume("privmix-ledger").glob("first.db*"):
        file.unlink()
    copies.run(image, restore)
    copies.run(image, shown("privmix ledger verify", {"LEDGER": "/ledger/first.db"}))
    assert "privmix ledger forfeit" in check(head, image)
    ledger_init.run(image, shown("privmix ledger forfeit"))
    start(head, pods.manifests.cluster["headGroupSpec"], image)
    submit(head, pods.manifests)
    assert deployed(head)["status"] == "RUNNING"
    assert charged(head) >= before
    until(lambda: answers(head), START_S, head.logs)


@pytest.fixture
def large(image: str, postgresql: Server, tmp_path: Path) -> Iterator[Machine]:
    """Volumes for `gpu-ha`, with an ensemble. Five CPUs stand for a worker's GPU. Tokens are 0.2 s apart at least."""
    manifests = with_components("gpu-ha", tmp_path / "k8s", "ledger-init")
    values = {**yaml.safe_load(manifests.configuration()), "model": "/models/base"}
    values["shards"] |= {"num_gpus": 0, "num_cpus": 5, "copies": 2}
    values["coordinator"] |= {"pace_s": 0.2, "recovery_s": 20}
    values["engine"]["cache_gib"] = 0.5
    postgresql.folder.chmod(0o755)  # the pods' user reaches the server's socket in it
    url = "postgresql://USER:PASSWORD@HOST/first?sslmode=verify-full&sslrootcert=system"
    stored = {
        "privmix-api-keys": secret("privmix-api-keys", {"KEY": KEY}),
        "privmix-ledger": secret("privmix-ledger", {url: address(postgresql)}),
    }
    folder = tmp_path / "pods"
    with machine(folder, manifests, image, stored, yaml.safe_dump(values)) as pods, pods.redis(REDIS_PASSWORD):
        write_served_model(model := pods.volume("privmix-models") / "base", 2048)
        write_ensemble(pods.volume("privmix-ensembles") / "first", 2, model=model)
        pods.own()
        yield pods


def address(server: Server) -> str:
    """Creates a database and returns its URL for a pod that has `socket_of` its server."""
    return f"postgresql://postgres:{PASSWORD}@/{conninfo_to_dict(server.database())['dbname']}?host=/run/postgresql"


def socket_of(server: Server) -> str:
    """Returns the option of podman with which a pod reaches a PostgreSQL server of this machine."""
    return f"--volume={server.folder}:/run/postgresql"


class RayCluster:
    """The pods of one Ray cluster of `gpu-ha`, as KubeRay starts them; the head's host is `name`."""

    def __init__(self, pods: Machine, server: Server, image: str, name: str, workers: int) -> None:
        self.image, self.manifests, (self._group,) = image, pods.manifests, pods.manifests.workers
        redis = pods.manifests.cluster["gcsFaultToleranceOptions"]["redisAddress"]
        kept = {"RAY_REDIS_ADDRESS": redis, "REDIS_PASSWORD": REDIS_PASSWORD, "RAY_external_storage_namespace": name}
        patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
        self.head = pods.pod(name, pods.manifests.pods()[0], {"privmix-redis": pods.address})
        self.head.arguments = [*self.head.arguments, *ray_environment("127.0.0.1", **kept), socket_of(server)]
        hosts = {name: self.head.address}
        self.workers = [pods.pod(f"{name}-worker-{n}", pods.manifests.pods()[1], hosts) for n in range(workers)]
        for worker in self.workers:
            worker.arguments = [*worker.arguments, *ray_environment(name, **patience)]

    def start_head(self) -> None:
        group = self.manifests.cluster["headGroupSpec"]
        start(self.head, group, self.image, **{"redis-password": "$REDIS_PASSWORD"})

    def start_worker(self, number: int) -> Pod:
        worker = self.workers[number]
        worker.start(self.image, start_command(self._group, self.head.name))
        return worker

    def scale(self, copies: int) -> None:
        scaled = self.head.execute(*shown("privmix scale --copies", {"8": str(copies)}), "--json")
        assert json.loads(scaled.stdout)["copies"] == copies

    def open(self) -> list[Pod]:
        """Returns the workers whose probe passes: clients reach these."""
        probe = self._group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
        return [worker for worker in self.workers if worker.ask(probe).is_success]

    def serves(self, number: int) -> None:
        """Waits until a worker is ready, and answers."""
        worker = self.workers[number]
        until(lambda: worker in self.open() and answers(worker), START_S, worker.logs)


def stream(pod: Pod, tokens: int, texts: list[str]) -> str:
    """Collects the events with text of a stream while it runs, and returns the last event."""
    url, headers = f"http://{pod.address}:8000/v1/completions", {"authorization": f"Bearer {KEY}"}
    body, last = {**ASKED, "max_tokens": tokens, "ignore_eos": True, "stream": True}, ""
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120, trust_env=False) as answer:
        for line in filter(lambda line: line.startswith("data: "), answer.iter_lines()):
            last = line.removeprefix("data: ")
            texts.extend([last] if '"text"' in last else [])
    return last


def refused_s(pod: Pod) -> float:
    """Returns after how many seconds a request got 503 and a time to come back."""
    began = time.monotonic()
    answer = pod.ask("/v1/completions", key=KEY, body=ASKED)
    assert answer.status_code == 503 and "retry-after" in answer.headers, answer.text
    return time.monotonic() - began


def test_a_cluster_grows_loses_its_pods_and_its_ledger_and_is_followed_by_another(
    large: Machine, postgresql: Server, image: str
) -> None:
    """The pods of `gpu-ha` with three workers: Redis and PostgreSQL outlive the head."""
    init = ledger_job(large, large.manifests)
    init.arguments = [*init.arguments, socket_of(postgresql)]
    init.run(image, init.command)
    first = RayCluster(large, postgresql, image, "privmix-head-svc", 3)
    first.start_head()
    for number in range(2):
        first.start_worker(number)
    submit(first.head, large.manifests)
    for number in range(2):
        first.serves(number)
        worker = first.workers[number]
        assert worker.execute("ls", "/secrets", check=False).returncode
        shows = inherited(worker)
        assert "RAY_AUTH_MODE" in shows
        assert not {word for word in (KEY, PASSWORD, REDIS_PASSWORD) if word in shows}

    first.start_worker(2)  # as the autoscaler does, because a copy waits
    first.scale(3)
    first.serves(2)

    dump = backup(large)
    dump.arguments = [*dump.arguments, socket_of(postgresql), *containers.programs(postgresql.binaries)]
    dump.run(containers.BASE, dump.command)
    (copy,) = large.volume("privmix-backup").glob("ledger-*.dump")

    first.workers[0].kill()
    until(lambda: answers(first.workers[1]), START_S, first.workers[1].logs)
    first.start_worker(0)
    first.serves(0)

    before = charged(first.workers[1])
    first.head.kill()
    with ThreadPoolExecutor(20) as clients:
        refusals = []
        for number in range(20):
            refusals.append(clients.submit(refused_s, first.workers[number % 2]))
            time.sleep(1)
        waited = [refusal.result() for refusal in refusals]
    print("503 after", *(f"{seconds:.1f}" for seconds in waited), "s")
    assert max(waited) < 60
    first.start_head()
    for number in range(3):
        first.serves(number)
    assert charged(first.workers[1]) > before

    first.scale(1)
    second = RayCluster(large, postgresql, containers.next_version(image), "privmix-next-head-svc", 1)
    second.start_head()
    second.start_worker(0)
    submit(second.head, large.manifests)
    until(lambda: second.open() and second.workers[0].ask("/readyz").is_success, START_S, second.head.logs)
    until(lambda: len(first.open()) == 1, START_S, first.head.logs)
    (serving,) = first.open()
    assert answers(serving), "until the next cluster charges"
    before, short, long = charged(serving), list[str](), list[str]()
    with ThreadPoolExecutor(2) as clients:
        streams = [clients.submit(stream, serving, 100, short), clients.submit(stream, serving, 800, long)]
        until(lambda: short and long, START_S, first.head.logs)
        second.serves(0)
        *_, cut = ends = [each.result() for each in streams]
    assert {end for end in ends if "generation_failed" not in end} <= {"[DONE]"}
    assert "generation_failed" in cut, "once the old cluster has released what it had charged"
    assert "another deployment has the ledger" in serving.ask("/health").text
    assert charged(second.workers[0]) >= before + len(short) + len(long) - 2, "the last text of each may be empty"
    for pod in (*second.workers, second.head):
        pod.kill()
    began = time.monotonic()
    until(lambda: answers(serving), START_S, first.head.logs)
    print(f"the ledger was taken back after {time.monotonic() - began:.0f} s")

    before = charged(serving)
    for pod in (*first.workers, first.head):
        pod.kill()
    url = address(postgresql)
    _, *restore = shown("LEDGER=URL sh /scripts/restore.sh", {"COPY": copy.stem})
    assert dump.run(containers.BASE, restore, check=False).returncode, "a ledger is there"
    dump.arguments = [*dump.arguments, f"--env=LEDGER={url}"]
    dump.run(containers.BASE, restore)
    large.store("privmix-ledger", {"url": url})
    init.run(image, shown("privmix ledger verify", {"LEDGER": url}))
    assert known(init, image, url) < before
    assert "privmix ledger forfeit" in check(first.head, image)
    init.run(image, shown("privmix ledger forfeit"))
    assert known(init, image, url) >= before
