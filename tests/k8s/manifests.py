"""What kustomize makes of an overlay."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = ("cpu-dev", "gpu", "gpu-ha")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """Every object of one overlay, rendered."""

    overlay: str
    objects: tuple[Manifest, ...]

    def of(self, kind: str) -> list[Manifest]:
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str, name: str = "privmix") -> Manifest:
        (found,) = [one for one in self.of(kind) if one["metadata"]["name"] == name]
        return found

    @property
    def cluster(self) -> Manifest:
        spec: Manifest = self.one("RayService")["spec"]["rayClusterConfig"]
        return spec

    @property
    def workers(self) -> list[Manifest]:
        groups: list[Manifest] = self.cluster.get("workerGroupSpecs", [])
        return groups

    def pods(self) -> list[Manifest]:
        """The pod templates of the Ray cluster, the head's first."""
        return [group["template"] for group in (self.cluster["headGroupSpec"], *self.workers)]

    def job_pods(self) -> list[Manifest]:
        """The pod templates of jobs beside it."""
        repeated = [one["spec"]["jobTemplate"]["spec"]["template"] for one in self.of("CronJob")]
        return [*repeated, *(one["spec"]["template"] for one in self.of("Job"))]

    def serve_config(self) -> Any:
        return yaml.safe_load(self.one("RayService")["spec"]["serveConfigV2"])

    def configuration(self) -> str:
        """The YAML file that pods find in /etc/privmix."""
        (found,) = [one for one in self.of("ConfigMap") if one["metadata"]["name"].startswith("privmix-configuration-")]
        text: str = found["data"]["privmix.yaml"]
        return text


def render(overlay: str, folder: Path = K8S / "overlays") -> Manifests:
    """kustomize itself, or the one in kubectl; without them the test is skipped."""
    for program, *arguments in (("kustomize", "build"), ("kubectl", "kustomize")):
        if shutil.which(program):
            command = [program, *arguments, str(folder / overlay)]
            rendered = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            return Manifests(overlay, tuple(yaml.safe_load_all(rendered)))
    pytest.skip("neither kustomize nor kubectl is installed")
