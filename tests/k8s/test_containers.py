"""Claim: the image builds, and the pods of the overlays run in containers as Kubernetes and KubeRay start them."""

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from tests.ensembles import write_ensemble
from tests.k8s.containers import Machine, Pod, build, machine, ray_environment, start_command, unavailable, until
from tests.k8s.manifests import K8S, Manifests, render
from tests.postgresql import Server
from tests.tiny import write_served_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

IMAGE, KEY = "localhost/privmix:test", secrets.token_hex(16)
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


def with_components(overlay: str, folder: Path, *components: str) -> Manifests:
    """Renders a copy of an overlay that lists more components, as the page tells an operator to."""
    shutil.copytree(K8S, folder, dirs_exist_ok=True)
    file = folder / "overlays" / overlay / "kustomization.yaml"
    fields = yaml.safe_load(file.read_text())
    fields["components"] = [*fields.get("components", ()), *(f"../../components/{name}" for name in components)]
    file.write_text(yaml.safe_dump(fields))
    return render(overlay, folder / "overlays")


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


def test_workers_have_no_secret_and_come_back(image: str, postgresql: Server, tmp_path: Path) -> None:
    """The pods of `gpu`, with `num_gpus: 0` as the only change: a head, two workers and a PostgreSQL server."""
    manifests = render("gpu")
    values = {**yaml.safe_load(manifests.configuration()), "model": "/models/base"}
    values["shards"]["num_gpus"] = 0
    database = conninfo_to_dict(postgresql.database())["dbname"]
    postgresql.folder.chmod(0o755)  # the pods' user reaches the server's socket in it
    password = secrets.token_hex(16)
    stored = {
        "privmix-api-keys": {"api-keys": json.dumps([KEY])},
        "privmix-ledger": {"url": f"postgresql://postgres:{password}@/{database}?host=/run/postgresql"},
    }
    with machine(tmp_path / "pods", manifests, image, stored, yaml.safe_dump(values)) as pods:
        model = pods.volume("privmix-models") / "base"
        write_served_model(model, 2048)
        write_ensemble(pods.volume("privmix-ensembles") / "first", 2, model=model)
        pods.own()
        socket = f"--volume={postgresql.folder}:/run/postgresql"
        job = with_components("gpu", tmp_path / "k8s", "ledger-init").one("Job", "privmix-ledger-init")
        template = job["spec"]["template"]
        begins = pods.pod("ledger-init", template)
        begins.arguments = [*begins.arguments, socket]
        begun = begins.run(image, template["spec"]["containers"][0]["command"], check=False)
        assert begun.returncode == 0, begun.stderr

        head = pods.pod("privmix-head-svc", manifests.pods()[0])
        head.arguments = [*head.arguments, *ray_environment("127.0.0.1"), socket]
        hosts = {head.name: head.address}
        workers = [pods.pod(f"worker-{number}", manifests.pods()[1], hosts) for number in range(2)]
        (group,) = manifests.workers
        head.start(image, start_command(manifests.cluster["headGroupSpec"], None))
        until(lambda: head.get("/api/healthz", 52365)[0] == 200, START_S, head.logs)
        for worker in workers:
            worker.arguments = [*worker.arguments, *ray_environment(head.name)]
            worker.start(image, start_command(group, head.name))
        submit(head, manifests)
        ready = manifests.pods()[1]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
        for worker in workers:
            until(lambda worker=worker: worker.get(ready, 8000)[0] == 200, START_S, worker.logs)  # type: ignore[misc]
            until(lambda worker=worker: answers(worker), START_S, worker.logs)  # type: ignore[misc]
            shown = worker.execute("sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline").stdout
            assert worker.execute("ls", "/secrets", check=False).returncode
            assert "RAY_AUTH_MODE" in shown
            assert not {word for word in (KEY, password) if word in shown}

        workers[0].kill()
        until(lambda: answers(workers[1]), START_S, workers[1].logs)
        workers[0].start(image, start_command(group, head.name))
        until(lambda: answers(workers[0]), START_S, workers[0].logs)


def answers(pod: Pod) -> bool:
    return pod.get("/v1/completions", 8000, key=KEY, body=ASKED)[0] == 200
