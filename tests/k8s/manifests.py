"""Renders an overlay with kustomize and gives access to its objects."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = ("cpu-dev", "gpu", "gpu-ha")
KUBERNETES = "1.34"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """The rendered objects of one overlay."""

    overlay: str
    objects: tuple[Manifest, ...]

    def of(self, kind: str) -> list[Manifest]:
        return [item for item in self.objects if item["kind"] == kind]

    def one(self, kind: str, name: str = "privmix") -> Manifest:
        (match,) = [item for item in self.of(kind) if item["metadata"]["name"] == name]
        return match

    @property
    def cluster(self) -> Manifest:
        spec: Manifest = self.one("RayService")["spec"]["rayClusterConfig"]
        return spec

    @property
    def workers(self) -> list[Manifest]:
        groups: list[Manifest] = self.cluster.get("workerGroupSpecs", [])
        return groups

    def pods(self) -> list[Manifest]:
        """Returns the pod templates of the Ray cluster, the head's first."""
        return [group["template"] for group in (self.cluster["headGroupSpec"], *self.workers)]

    def job_pods(self) -> list[Manifest]:
        """Returns the pod templates of jobs and cron jobs."""
        repeated = [item["spec"]["jobTemplate"]["spec"]["template"] for item in self.of("CronJob")]
        return [*repeated, *(item["spec"]["template"] for item in self.of("Job"))]

    def serve_config(self) -> Any:
        return yaml.safe_load(self.one("RayService")["spec"]["serveConfigV2"])

    def configuration(self) -> str:
        """Returns the YAML file that pods mount in /etc/privmix."""
        (config_map,) = [
            item for item in self.of("ConfigMap") if item["metadata"]["name"].startswith("privmix-configuration-")
        ]
        text: str = config_map["data"]["privmix.yaml"]
        return text


def render(overlay: str, folder: Path = K8S / "overlays") -> Manifests:
    """Renders an overlay with kustomize or kubectl. Skips the test if neither is installed."""
    for program, *arguments in (("kustomize", "build"), ("kubectl", "kustomize")):
        if shutil.which(program):
            command = [program, *arguments, str(folder / overlay)]
            rendered = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            return Manifests(overlay, tuple(yaml.safe_load_all(rendered)))
    pytest.skip("neither kustomize nor kubectl is installed")


def with_components(overlay: str, folder: Path, *components: str) -> Manifests:
    """Renders a copy of an overlay that lists more components, as the page tells an operator to."""
    shutil.copytree(K8S, folder, dirs_exist_ok=True)
    file = folder / "overlays" / overlay / "kustomization.yaml"
    fields = yaml.safe_load(file.read_text())
    fields["components"] = [*fields.get("components", ()), *(f"../../components/{name}" for name in components)]
    file.write_text(yaml.safe_dump(fields))
    return render(overlay, folder / "overlays")
