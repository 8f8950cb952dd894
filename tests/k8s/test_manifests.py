"""Claim: every overlay is valid for Kubernetes, KubeRay and Serve, and gives attackers no access."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from privmix.budget.metrics import STATES
from privmix_cluster.configuration import Configuration
from tests.k8s.manifests import K8S, KUBERNETES, Manifest, Manifests

# The OpenAPI schema of `RayService` v1 in KubeRay 1.6, without descriptions: from its CustomResourceDefinition
# `ray.io_rayservices.yaml` (Apache 2.0).
RAYSERVICE = Path(__file__).with_name("rayservice.v1.json.gz")
FOREIGN = {"ray.io/v1", "monitoring.coreos.com/v1"}
PART_OF = {"app.kubernetes.io/part-of": "privmix"}
HTTP = 8000
SERVICES = K8S.parent / "services" / "privmix"
METRIC = re.compile(r"ray_privmix_\w+")
DEFINITION = re.compile(r"(?i)(Counter|Gauge|Histogram)\(\s*\"(privmix_\w+)\"")


def closed(schema: Any) -> Any:
    """Returns the schema without additional properties, which the API server would drop without a message."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        inner.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return inner


@pytest.fixture(scope="session")
def rayservice() -> Draft202012Validator:
    return Draft202012Validator(closed(json.loads(gzip.decompress(RAYSERVICE.read_bytes()))))


@pytest.fixture
def configuration(manifests: Manifests, tmp_path: Path) -> Configuration:
    (file := tmp_path / "privmix.yaml").write_text(manifests.configuration())
    return Configuration.load(file)


def as_pod(template: Manifest) -> Manifest:
    metadata = {"name": "pod", **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def containers(manifests: Manifests) -> Iterator[Manifest]:
    """Yields the containers of the Ray cluster."""
    for pod in manifests.pods():
        yield from pod["spec"]["containers"]


def every_container(manifests: Manifests) -> Iterator[Manifest]:
    yield from containers(manifests)
    for pod in manifests.job_pods():
        yield from (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])


def test_kubernetes_accepts_every_object(manifests: Manifests) -> None:
    own = [item for item in manifests.objects if item["apiVersion"] not in FOREIGN]
    assert {item["kind"] for item in own} >= {"ConfigMap", "NetworkPolicy", "PersistentVolumeClaim", "ServiceAccount"}
    for item in (*own, *map(as_pod, manifests.pods())):
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


def test_kuberay_accepts_the_service(manifests: Manifests, rayservice: Draft202012Validator) -> None:
    service = manifests.one("RayService")
    assert not [error.message for error in rayservice.iter_errors(service)]
    assert not rayservice.is_valid({**service, "spec": {**service["spec"], "serveConfigV3": ""}})


def test_serve_accepts_its_configuration(manifests: Manifests) -> None:
    serve = ServeDeploySchema.model_validate(manifests.serve_config())
    assert serve.http_options.port == HTTP
    assert [item.import_path for item in serve.applications] == ["privmix_cluster.application:build"]


def secrets_of(pod: Manifest, container: Manifest) -> set[str]:
    """Returns the Secrets that a container sees, in its files and in its environment."""
    volumes = {item["name"]: item["secret"]["secretName"] for item in pod.get("volumes", ()) if "secret" in item}
    mounted = {volumes[mount["name"]] for mount in container.get("volumeMounts", ()) if mount["name"] in volumes}
    variables = [item["valueFrom"] for item in container.get("env", ()) if "valueFrom" in item]
    whole = [item["secretRef"]["name"] for item in container.get("envFrom", ()) if "secretRef" in item]
    return mounted | {item["secretKeyRef"]["name"] for item in variables if "secretKeyRef" in item} | set(whole)


def test_a_container_sees_the_secrets_that_it_needs_alone(manifests: Manifests) -> None:
    ledger = {"privmix-ledger"} if manifests.workers else set()
    head, *workers = manifests.pods()
    wanted = {"privmix-api-keys"} | ledger
    for container in head["spec"]["containers"]:
        assert secrets_of(head["spec"], container) == wanted
        assert not [item for item in container["env"] if "valueFrom" in item], "children inherit variables"
    for worker in workers:
        for container in (*worker["spec"]["containers"], *worker["spec"].get("initContainers", ())):
            assert secrets_of(worker["spec"], container) == set()
    for job in manifests.job_pods():
        for container in job["spec"]["containers"]:
            assert secrets_of(job["spec"], container) == ledger


def test_a_worker_has_the_gpus_that_a_shard_reserves(manifests: Manifests, configuration: Configuration) -> None:
    wanted = configuration.shards.num_gpus
    assert wanted is not None, "without a number of GPUs, the head would choose the CPU before the first worker joins"
    for group in manifests.workers:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert float(limits.get("nvidia.com/gpu", 0)) == wanted
        assert limits.get("nvidia.com/gpu") == container["resources"]["requests"].get("nvidia.com/gpu")
    assert manifests.workers or not wanted


def test_workers_grow_within_their_bounds(manifests: Manifests, configuration: Configuration) -> None:
    for group in manifests.workers:
        assert configuration.shards.count is not None
        assert group["replicas"] == configuration.shards.count * configuration.shards.copies
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert manifests.cluster.get("enableInTreeAutoscaling") or group["minReplicas"] == group["maxReplicas"]


def test_no_container_may_do_more_than_it_must(manifests: Manifests) -> None:
    autoscaler = manifests.cluster.get("autoscalerOptions")
    all_containers = (*every_container(manifests), *([autoscaler] if autoscaler else []))
    for context in [item["securityContext"] for item in all_containers]:
        assert context["runAsNonRoot"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for pod in (*manifests.pods(), *manifests.job_pods()):
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"])
        assert not [item for item in pod["spec"]["volumes"] if "hostPath" in item]


def test_kubernetes_itself_refuses_pods_that_may_do_more(manifests: Manifests) -> None:
    labels = manifests.one("Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {item["metadata"]["namespace"] for item in manifests.objects if item["kind"] != "Namespace"} == {"privmix"}


def test_no_model_runs_beside_a_token_of_the_cluster(manifests: Manifests) -> None:
    assert not manifests.one("ServiceAccount")["automountServiceAccountToken"]
    for pod in (*manifests.pods(), *manifests.job_pods()):
        assert not pod["spec"]["automountServiceAccountToken"]
        tokens = {
            volume["name"]
            for volume in pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        }
        for container in pod["spec"]["containers"]:
            assert not tokens & {item["name"] for item in container["volumeMounts"]}


def test_clients_reach_the_http_route_alone(manifests: Manifests) -> None:
    policy = manifests.one("NetworkPolicy")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    for pod in manifests.pods():
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()

    opened = {}
    for rule in policy["ingress"]:
        (peer,) = rule["from"]
        opened[json.dumps(peer, sort_keys=True)] = {port["port"] for port in rule.get("ports", [])}
    among_themselves = json.dumps({"podSelector": {"matchLabels": PART_OF}})
    clients = json.dumps({"namespaceSelector": {"matchLabels": {"privmix/clients": "true"}}})
    assert opened.pop(among_themselves) == set()
    assert opened.pop(clients) == {HTTP}
    assert all(opened.values()), "a rule without ports opens all of them"
    peers = [json.loads(peer) for peer in opened]
    labels = sorted(next(iter(peer["podSelector"]["matchLabels"].items())) for peer in peers)
    # KubeRay's kustomization and its Helm chart both set this label of the operator.
    operator = ("app.kubernetes.io/component", "kuberay-operator")
    assert labels == [operator, ("app.kubernetes.io/name", "prometheus")]


def test_a_pods_own_label_opens_no_port(manifests: Manifests) -> None:
    """The creator of a pod chooses its labels; only an administrator chooses those of a namespace, as the page says."""
    page = (K8S / "README.md").read_text()
    for policy in manifests.of("NetworkPolicy"):
        rules = (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ()))
        for peer in (peer for rule in rules for peer in (*rule.get("from", ()), *rule.get("to", ()))):
            selected = peer.get("namespaceSelector")
            assert selected != {}, "every namespace"
            labels = [f"{key}={value}" for key, value in (selected or {}).get("matchLabels", {}).items()]
            assert selected is None or labels
            assert all(label in page or label.startswith("kubernetes.io/") for label in labels)


def test_no_other_policy_lets_anyone_in(manifests: Manifests) -> None:
    for policy in (item["spec"] for item in manifests.of("NetworkPolicy") if item["metadata"]["name"] != "privmix"):
        assert "ingress" not in policy
        backs_up = policy["podSelector"]["matchLabels"].get("app.kubernetes.io/component") == "backup"
        assert set(policy["policyTypes"]) == ({"Ingress", "Egress"} if backs_up else {"Egress"})


def test_a_backup_reaches_the_database_alone(manifests: Manifests) -> None:
    policy = manifests.one("NetworkPolicy", "privmix-backup")["spec"]
    (pod,) = manifests.job_pods()
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    reached = {port["port"] for rule in policy.get("egress", ()) for port in rule["ports"]}
    assert reached == (set() if manifests.overlay == "cpu-dev" else {53, 5432})


def test_pods_reach_what_they_are_told_of_alone(manifests: Manifests) -> None:
    rules = manifests.one("NetworkPolicy")["spec"]["egress"]
    reached = {port["port"] for rule in rules for port in rule.get("ports", [])}
    assert reached == {53} | ({6379} if manifests.overlay == "gpu-ha" else set())
    assert all(rule["to"] for rule in rules)


def test_who_has_the_ledgers_url_reaches_its_database_alone(manifests: Manifests) -> None:
    policies = [item["spec"] for item in manifests.of("NetworkPolicy") if item["metadata"]["name"] == "privmix-ledger"]
    if not manifests.workers:
        assert not policies
        return
    (policy,) = policies
    assert policy["podSelector"]["matchLabels"] == PART_OF
    (expression,) = policy["podSelector"]["matchExpressions"]
    assert expression["operator"] == "In"
    assert expression["values"] == ["head", "ledger-init"]
    (rule,) = policy["egress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 5432}]


def test_prometheus_finds_the_metrics_of_every_pod(manifests: Manifests) -> None:
    monitor = manifests.one("PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    groups = (manifests.cluster["headGroupSpec"], *manifests.workers)
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert group["rayStartParams"]["metrics-export-port"] == str(ports[endpoint["port"]])
        assert monitor["selector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()


def test_the_dashboard_is_grafanas(manifests: Manifests) -> None:
    board = manifests.one("ConfigMap", "privmix-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    panels = json.loads(board["data"]["privmix.json"])["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    asked = {name for panel in panels for target in panel["targets"] for name in METRIC.findall(target["expr"])}
    assert asked == exported()


def exported() -> set[str]:
    """Returns the names of the services' own metrics, as Ray exports them."""
    endings = {"Counter": "_total", "Histogram": "_bucket", "Gauge": ""}
    defined = (found for file in SERVICES.glob("**/*.py") for found in DEFINITION.findall(file.read_text()))
    return {f"ray_{name}{endings[kind.capitalize()]}" for kind, name in defined}


def test_disruption_budgets_keep_the_head_and_all_workers_but_one(manifests: Manifests) -> None:
    groups = {"head": 1, **{item["groupName"]: item["minReplicas"] for item in manifests.workers}}
    budgets = {
        item["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: item["spec"]["minAvailable"]
        for item in manifests.of("PodDisruptionBudget")
    }
    expected = {"cpu-dev": {}, "gpu": {"head": 1}, "gpu-ha": {"head": 1, "shard": groups.get("shards", 0) - 1}}
    assert budgets == expected[manifests.overlay]


def test_alerts_ask_for_metrics_that_exist(manifests: Manifests) -> None:
    defined = {name.removesuffix("_bucket") for name in exported()} | exported()
    rules = [rule for group in manifests.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    for rule in rules:
        assert set(METRIC.findall(rule["expr"])) <= defined
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
    runbook = (K8S / "runbook.md").read_text()
    pages = {page.partition("\n")[0]: page for page in runbook.split("\n## ")[1:]}
    for rule in rules:
        page = pages[rule["alert"]]
        assert [line.split()[1] for line in page.splitlines() if line.startswith("- ")] == ["Means:", "Look", "Do:"]
    named = {name for name in pages if name.startswith("Privmix")}
    assert named == {rule["alert"] for rule in rules}, "no page without an alert"


def test_errors_that_alert_are_codes_of_the_gateway(manifests: Manifests) -> None:
    rules = [rule for group in manifests.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    asked = {
        code for rule in rules for codes in re.findall(r'reason=~"([^"]*)"', rule["expr"]) for code in codes.split("|")
    }
    sources = "".join(file.read_text() for file in (SERVICES / "gateway").glob("*.py"))
    assert asked
    assert not [code for code in asked if f'"{code}"' not in sources]


def test_every_state_of_an_alert_is_one_of_the_ledgers(manifests: Manifests) -> None:
    rules = [rule for group in manifests.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    asked = {state for rule in rules for state in re.findall(r'state="(\w+)"', rule["expr"])}
    assert asked
    assert asked <= set(STATES)
