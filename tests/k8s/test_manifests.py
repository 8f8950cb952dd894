"""What every overlay must be before a cluster sees it: valid to the letter, and nobody's way in."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from cluster.configuration import Configuration
from tests.k8s.manifests import K8S, Manifest, Manifests

KUBERNETES = "1.34"
KUBERAY = K8S.parents[1] / "shared" / "k8s" / "ray.io_rayservices.yaml"
FOREIGN = {"ray.io/v1", "monitoring.coreos.com/v1"}
PART_OF = {"app.kubernetes.io/part-of": "privmix"}
HTTP = 8000
SERVICES = K8S.parent / "services"
METRIC = re.compile(r"ray_privmix_\w+")
DEFINITION = re.compile(r"(Counter|Gauge|Histogram)\(\s*\"(privmix_\w+)\"")

Change = Callable[[Manifest], object]


def closed(schema: Any) -> Any:
    """The schema, refusing what it does not name: as the API server would drop it in silence."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        inner.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return inner


@pytest.fixture(scope="session")
def rayservice() -> Draft202012Validator:
    if not KUBERAY.is_file():
        pytest.skip("KubeRay's definitions are not there: ../shared/k8s beside the repository")
    definition = yaml.load(KUBERAY.read_text(), Loader=yaml.CSafeLoader)
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    return Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


@pytest.fixture
def configuration(manifests: Manifests, tmp_path: Path) -> Configuration:
    (file := tmp_path / "privmix.yaml").write_text(manifests.configuration())
    return Configuration.load(file)


def as_pod(template: Manifest) -> Manifest:
    metadata = {"name": "pod", **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def containers(manifests: Manifests) -> Iterator[Manifest]:
    for pod in manifests.pods():
        yield from pod["spec"]["containers"]


def test_kubernetes_accepts_every_object(manifests: Manifests) -> None:
    own = [one for one in manifests.objects if one["apiVersion"] not in FOREIGN]
    assert {one["kind"] for one in own} >= {"ConfigMap", "NetworkPolicy", "PersistentVolumeClaim", "ServiceAccount"}
    for one in (*own, *map(as_pod, manifests.pods())):
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_kubernetes_refuses_a_misspelt_field(manifests: Manifests) -> None:
    pod = as_pod(manifests.pods()[0])
    pod["spec"]["automountServiceAccountTokens"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    del pod["spec"]["automountServiceAccountTokens"]


def test_kuberay_accepts_the_service(manifests: Manifests, rayservice: Draft202012Validator) -> None:
    assert not [error.message for error in rayservice.iter_errors(manifests.one("RayService"))]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(serveConfigV3=""),
        lambda spec: spec["rayClusterConfig"].pop("headGroupSpec"),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(securityContexts={}),
        lambda spec: spec["rayClusterConfig"].update(enableInTreeAutoscaling="yes"),
    ],
)
def test_kuberays_schema_refuses_mistakes(
    spoil: Change, manifests: Manifests, rayservice: Draft202012Validator
) -> None:
    service = json.loads(json.dumps(manifests.one("RayService")))
    spoil(service["spec"])
    assert not rayservice.is_valid(service)


def test_serve_accepts_its_configuration(manifests: Manifests) -> None:
    serve = ServeDeploySchema.model_validate(manifests.serve_config())
    assert serve.http_options.port == HTTP
    assert [one.import_path for one in serve.applications] == ["cluster.application:build"]


def test_every_pod_finds_the_configuration(manifests: Manifests) -> None:
    (application,) = manifests.serve_config()["applications"]
    file = Path(application["args"]["config"])
    for pod in manifests.pods():
        (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "configuration"]
        name = volume["configMap"]["name"]
        assert name != "privmix-configuration", "a changed configuration must be a changed pod"
        assert file.name in manifests.one("ConfigMap", name)["data"]
    for container in containers(manifests):
        assert str(file.parent) in [one["mountPath"] for one in container["volumeMounts"]]


def test_the_configuration_names_mounted_volumes(manifests: Manifests, configuration: Configuration) -> None:
    for container in containers(manifests):
        mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
        assert mounts[f"/{configuration.ensemble.parts[1]}"]["readOnly"]
        from_secrets = {one["name"] for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})}
        assert "PRIVMIX_HTTP__API_KEYS" in from_secrets
        ledger = Path(configuration.budget.ledger)
        assert "PRIVMIX_BUDGET__LEDGER" in from_secrets or str(ledger.parent) in mounts


def test_a_worker_has_the_gpus_that_a_shard_reserves(manifests: Manifests, configuration: Configuration) -> None:
    wanted = configuration.shards.num_gpus
    assert wanted is not None, "without GPUs the cluster would decide for the CPU before its first worker came"
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
    for context in [one["securityContext"] for one in (*containers(manifests), *([autoscaler] if autoscaler else []))]:
        assert context["runAsNonRoot"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for pod in manifests.pods():
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"])
        assert not [one for one in pod["spec"]["volumes"] if "hostPath" in one]


def test_kubernetes_itself_refuses_pods_that_may_do_more(manifests: Manifests) -> None:
    labels = manifests.one("Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {one["metadata"]["namespace"] for one in manifests.objects if one["kind"] != "Namespace"} == {"privmix"}


def test_what_is_written_goes_to_volumes(manifests: Manifests) -> None:
    for container in containers(manifests):
        writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
        directories = {one["value"] for one in container["env"] if one["name"] in {"HOME", "PRIVMIX_CACHE"}}
        assert directories | {"/tmp"} <= writable


def test_no_model_runs_beside_a_token_of_the_cluster(manifests: Manifests) -> None:
    assert not manifests.one("ServiceAccount")["automountServiceAccountToken"]
    for pod in manifests.pods():
        assert not pod["spec"]["automountServiceAccountToken"]
        tokens = {
            volume["name"]
            for volume in pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        }
        for container in pod["spec"]["containers"]:
            assert not tokens & {one["name"] for one in container["volumeMounts"]}


def test_images_are_named_by_version(manifests: Manifests) -> None:
    for container in containers(manifests):
        _, _, tag = container["image"].rpartition(":")
        assert tag.startswith("0.")


def test_every_container_has_probes_and_resources(manifests: Manifests) -> None:
    for container in containers(manifests):
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            assert isinstance(asked["port"], int) or asked["port"] in ports
        for resource in ("cpu", "memory"):
            assert container["resources"]["requests"][resource]
            assert container["resources"]["limits"][resource]


def test_a_worker_is_ready_for_clients_when_its_route_is(manifests: Manifests) -> None:
    for group in manifests.workers:
        (container,) = group["template"]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}


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
    named = [json.loads(peer)["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for peer in opened]
    assert sorted(named) == ["kuberay-operator", "prometheus"]


def test_no_other_policy_lets_anyone_in(manifests: Manifests) -> None:
    others = [one["spec"] for one in manifests.of("NetworkPolicy") if one["metadata"]["name"] != "privmix"]
    assert all(one["policyTypes"] == ["Egress"] for one in others)
    for one in others:  # the Kubernetes API, whose address is not known: from the head alone
        assert one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "head"


def test_pods_reach_what_they_are_told_of_alone(manifests: Manifests) -> None:
    rules = manifests.one("NetworkPolicy")["spec"]["egress"]
    reached = {port["port"] for rule in rules for port in rule.get("ports", [])}
    databases = {"cpu-dev": set(), "gpu": {5432}, "gpu-ha": {5432, 6379}}
    assert reached == {53} | databases[manifests.overlay]
    assert all(rule["to"] for rule in rules)


def test_every_worker_has_a_gateway_of_its_own(manifests: Manifests, configuration: Configuration) -> None:
    (application,) = manifests.serve_config()["applications"]
    (gateway,) = application["deployments"]
    assert gateway["max_replicas_per_node"] == 1
    assert "num_replicas" not in gateway, "the configuration says how many"
    assert configuration.http.replicas == sum(group["replicas"] for group in manifests.workers) or not manifests.workers


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
    """The series of the services' own metrics that a dashboard draws, as Ray exports them."""
    endings = {"Counter": "_total", "Histogram": "_bucket", "Gauge": ""}
    defined = (found for file in SERVICES.glob("*/metrics.py") for found in DEFINITION.findall(file.read_text()))
    return {f"ray_{name}{endings[kind]}" for kind, name in defined}


def test_disruption_budgets_leave_someone_to_answer(manifests: Manifests) -> None:
    budgets = manifests.of("PodDisruptionBudget")
    assert budgets or manifests.overlay != "gpu-ha"
    for budget in budgets:
        kept, labels = budget["spec"]["minAvailable"], budget["spec"]["selector"]["matchLabels"]
        (group,) = [one for one in manifests.workers if labels.items() <= one["template"]["metadata"]["labels"].items()]
        assert 0 < kept < group["minReplicas"]
