"""Renders an overlay with kustomize, gives access to its objects, and reads the commands of the page."""

import base64
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.test_readmes import FENCE, blocks, commands

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


def shown(begin: str, filled: Mapping[str, str] = {}) -> list[str]:
    """Returns the page's command that begins so, with its placeholders filled in; what `kubectl exec` runs in a pod."""
    text = (K8S / "README.md").read_text()
    inline = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)))
    every = (list(command) for code in (*blocks(text), *inline) for command in commands(code))
    within = (command[command.index("--") + 1 :] if "--" in command else command for command in every)
    found = next(command for command in within if shlex.join(command).startswith(begin))
    for placeholder, value in filled.items():
        found = [word.replace(placeholder, value) for word in found]
    return found


def secret(name: str, filled: Mapping[str, str]) -> dict[str, str]:
    """Returns the content of the Secret that the page's command creates."""
    command = [*shown(f"kubectl -n privmix create secret generic {name}", filled), "--dry-run=client", "--output=json"]
    created = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return {key: base64.b64decode(value).decode() for key, value in json.loads(created)["data"].items()}
