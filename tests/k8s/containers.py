"""Builds the image and runs the pods of an overlay as containers of this machine, without a registry or a cluster.

A base is made with debootstrap and the Python that runs the tests, because no registry is asked for the official one.
The Dockerfile itself is unchanged. Each pod has a network namespace, and the securityContext, environment, volumes and
command line that Kubernetes and KubeRay 1.6 give it. Needs root and Debian's packages, which are installed if missing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.k8s.manifests import K8S, Manifests

PROGRAMS = ("buildah", "podman", "runc", "debootstrap", "ip", "redis-server", "nginx")
PACKAGES = ("buildah", "podman", "runc", "debootstrap", "iproute2", "redis-server", "nginx-light")
LIBRARIES = "ca-certificates,libssl3,libsqlite3-0,libffi8,zlib1g,libbz2-1.0,liblzma5,libreadline8,libexpat1"
"""What a Python built from source links to."""
PASSED_ON = ("PIP_CERT", "SSL_CERT_FILE", "PIP_FIND_LINKS", "PIP_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""The variables of this machine by which its installers reach a package index."""
BASE, USER = "localhost/python:privmix-test", 1000
LIMITS = ("--ulimit=nofile=16384:16384", "--ulimit=nproc=16384:16384")
"""Podman's defaults are above what some machines allow."""
TOKEN = "0123456789abcdef" * 4


def unavailable() -> str | None:
    """Returns the reason why this machine cannot run containers, or None. Installs the programs if they are missing."""
    if os.geteuid() != 0:
        return "containers need root here"
    if not all(map(shutil.which, PROGRAMS)):
        if shutil.which("apt-get") is None:
            return f"containers need {', '.join(PROGRAMS)}"
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        install = ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *PACKAGES]
        if subprocess.run(install, check=False, stdout=subprocess.DEVNULL).returncode:
            return f"{', '.join(PACKAGES)} cannot be installed"
    probe = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], check=False)
    return "namespaces are not allowed here" if probe.returncode else None


def build(tag: str, folder: Path, accelerator: str = "cpu") -> None:
    """Builds the image of `k8s/Dockerfile` on a base that it makes in `folder`.

    Raises:
        CalledProcessError: the build failed; its output is on standard error.
    """
    if subprocess.run(["podman", "image", "exists", BASE], check=False).returncode:
        _base(folder)
    links = [Path(place) for place in os.environ.get("PIP_FIND_LINKS", "").split() if Path(place).is_dir()]
    command = ["buildah", "build", "--layers", "--network", "host", "--isolation", "oci", "--runtime", "runc"]
    volumes = [f"--volume={place}:{place}:ro" for place in links]
    arguments = [f"--build-arg=PYTHON={BASE.rpartition(':')[2]}", f"--build-arg=ACCELERATOR={accelerator}"]
    file = ["--file", str(K8S / "Dockerfile"), "--tag", tag, str(K8S.parent)]
    subprocess.run([*command, *volumes, *arguments, *file], check=True, stdout=sys.stderr)


def next_version(image: str) -> str:
    """Builds an image that differs from another one, and returns its name."""
    command = ["buildah", "build", "--runtime", "runc", "--tag", f"{image}-next", "--file", "-"]
    subprocess.run(command, input=f"FROM {image}\nENV VERSION=next\n", text=True, check=True, stdout=sys.stderr)
    return f"{image}-next"


def programs(folder: Path) -> list[str]:
    """Returns the options of podman that add PostgreSQL's programs, which need their package's libraries."""
    package = folder.parents[1]
    added = (f"--volume={place}:{place}:ro" for place in (package, package.with_name(f"{package.name}.libs")))
    return [*added, f"--env=PATH={folder}:/usr/local/bin:/usr/bin:/bin"]


def _base(folder: Path) -> None:
    """Makes the base: Debian of this machine's release, and this Python in /usr/local, as the official image has it."""
    root, suite = folder / "base", "bookworm"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={LIBRARIES}", suite, str(root)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    python = f"python3.{sys.version_info.minor}"
    skipped = ["--exclude=site-packages", "--exclude=test", "--exclude=__pycache__", "--exclude=*.a"]
    packed = ["tar", "-C", sys.base_prefix, *skipped, "-c", f"bin/{python}", "lib", "include"]
    with subprocess.Popen(packed, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-C", str(root / "usr/local"), "-x"], stdin=archive.stdout, check=True)
    for name, target in (("python3", python), ("python", "python3")):
        (root / "usr/local/bin" / name).symlink_to(target)
    for command in (["ldconfig"], ["python3", "-m", "ensurepip"]):
        subprocess.run(["chroot", str(root), *command], check=True, stdout=subprocess.DEVNULL)
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
    shutil.copytree("/etc/apt", root / "etc/apt", dirs_exist_ok=True)
    variables = [f"--change=ENV {name}={os.environ[name]}" for name in PASSED_ON if name in os.environ]
    packed = ["tar", "-C", str(root), "-c", "."]
    with subprocess.Popen(packed, stdout=subprocess.PIPE) as archive:
        subprocess.run(["podman", "import", *variables, "-", BASE], stdin=archive.stdout, check=True)
    shutil.rmtree(root)


@dataclass
class Pod:
    """A pod's container. `arguments` are those of `podman run`, without its name and command."""

    name: str
    address: str
    arguments: Sequence[str]
    template: Mapping[str, Any]

    def start(self, image: str, command: Sequence[str]) -> None:
        """Starts the container in the background, and again whenever it ends, as a kubelet does."""
        self.kill()
        run = ["podman", "--runtime", "runc", "run", "--detach", "--restart=always", f"--name={self.name}"]
        run += self.arguments
        subprocess.run([*run, image, *command], check=True, stdout=subprocess.DEVNULL)

    @property
    def command(self) -> list[str]:
        """The command of its template."""
        container = self.template["spec"]["containers"][0]
        return [*container["command"], *container.get("args", ())]

    def run(self, image: str, command: Sequence[str], check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Runs a container of the pod to its end and returns what it printed."""
        run = ["podman", "--runtime", "runc", "run", "--rm", f"--name={self.name}-once", *self.arguments]
        return _shown([*run, image, *command], check)

    def execute(self, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Runs a command in the container, as `kubectl exec` does."""
        return _shown(["podman", "exec", self.name, *command], check)

    def logs(self) -> str:
        shown = subprocess.run(["podman", "logs", self.name], capture_output=True, text=True, check=False)
        return shown.stdout + shown.stderr

    def kill(self) -> None:
        """Kills all processes of the container, like the loss of its node."""
        subprocess.run(["podman", "rm", "--force", "--ignore", "--time=0", self.name], check=True, capture_output=True)

    def ask(self, path: str, *, key: str | None = None, body: Any = None, port: int = 8000) -> httpx.Response:
        """Asks the pod's address from this machine. Status 0: nothing answered."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        method, url = "GET" if body is None else "POST", f"http://{self.address}:{port}{path}"
        try:
            return httpx.request(method, url, json=body, headers=headers, timeout=120, trust_env=False)
        except httpx.HTTPError:
            return httpx.Response(0)


@dataclass
class Machine:
    """Pods on one bridge. `volumes` has a folder for each claim, `objects` one for each ConfigMap and Secret."""

    folder: Path
    manifests: Manifests
    image: str
    secrets: dict[str, Mapping[str, str]]
    configuration: str
    network: int
    pods: list[Pod] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The address of this machine on the bridge."""
        return f"10.214.{self.network}.1"

    @contextmanager
    def redis(self, password: str) -> Iterator[None]:
        """Runs a Redis server at `address`, as the page tells an operator to."""
        folder = self._owned(self.folder / "redis", 0o700)
        options = {"bind": self.address, "dir": str(folder), "requirepass": password, "appendonly": "yes"}
        command = ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                yield
            finally:
                server.terminate()

    def volume(self, claim: str) -> Path:
        """Returns the folder of a PersistentVolumeClaim, which the pods' group owns."""
        return self._owned(self.folder / "claims" / claim, 0o770)

    def own(self) -> None:
        """Gives what a test wrote on the volumes to the pods' group, as `fsGroup` does."""
        subprocess.run(["chown", "-R", f":{USER}", str(self.folder / "claims")], check=True)
        subprocess.run(["chmod", "-R", "g+rwX", str(self.folder / "claims")], check=True)

    def store(self, name: str, content: Mapping[str, str]) -> None:
        """Replaces a Secret, also in pods that mount it."""
        self.secrets[name] = content
        self._files(name, content)

    def pod(self, name: str, template: Mapping[str, Any], hosts: Mapping[str, str] = {}) -> Pod:
        """Returns the pod of a template: what Kubernetes makes of its first container, in a namespace of its own."""
        spec = template["spec"]
        (container, *_), context = spec["containers"], spec["securityContext"]
        number = 10 + len(self.pods)
        namespace, address = f"pmxc{self.network}n{number}", f"10.214.{self.network}.{number}"
        _namespace(namespace, address, f"pmxc{self.network}")
        arguments = [
            f"--network=ns:/run/netns/{namespace}",
            f"--user={context['runAsUser']}:{context['runAsGroup']}",
            "--read-only",
            "--read-only-tmpfs=false",
            "--cap-drop=all",
            "--security-opt=no-new-privileges",
            *LIMITS,
            "--pids-limit=-1",
            "--shm-size=512m",
            f"--hostname={name}",
            *(f"--add-host={host}:{place}" for host, place in {name: address, **hosts}.items()),
            *(f"--env={item['name']}={self._value(item)}" for item in container.get("env", ())),
        ]
        volumes = {each["name"]: each for each in spec.get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            source = self._source(name, volumes[mount["name"]])
            ending = ":ro" if mount.get("readOnly") else ""
            arguments.append(f"--volume={source}:{mount['mountPath']}{ending}")
        self.pods.append(made := Pod(name, address, arguments, template))
        return made

    def _value(self, variable: Mapping[str, Any]) -> str:
        """Returns what a variable's own text or its Secret says."""
        if "value" in variable:
            return str(variable["value"])
        named = variable["valueFrom"]["secretKeyRef"]
        return self.secrets[named["name"]][named["key"]]

    def _source(self, pod: str, volume: Mapping[str, Any]) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self.volume(claim["claimName"])
        if secret := volume.get("secret"):
            return self._files(secret["secretName"], self.secrets[secret["secretName"]])
        if chosen := volume.get("configMap"):
            name = chosen["name"]
            if name.startswith("privmix-configuration"):
                return self._files(name, {"privmix.yaml": self.configuration})
            data: Mapping[str, str] = self.manifests.one("ConfigMap", name)["data"]
            return self._files(name, data)
        return self._owned(self.folder / "scratch" / pod / volume["name"], 0o770)

    def _files(self, name: str, contents: Mapping[str, str]) -> Path:
        folder = self._owned(self.folder / "objects" / name, 0o750)
        for file, text in contents.items():
            (folder / file).write_text(text)
            os.chown(folder / file, 0, USER)
            (folder / file).chmod(0o440)
        return folder

    def _owned(self, folder: Path, mode: int) -> Path:
        if not folder.exists():
            folder.mkdir(parents=True)
            os.chown(folder, 0, USER)
            folder.chmod(mode)
        return folder


@contextmanager
def machine(
    folder: Path, manifests: Manifests, image: str, secrets: Mapping[str, Mapping[str, str]], configuration: str
) -> Iterator[Machine]:
    """Makes the bridge of the pods. Ends all containers and namespaces with the context."""
    network = next(number for number in range(100) if not Path(f"/sys/class/net/pmxc{number}").exists())
    bridge = f"pmxc{network}"
    _ip("link", "add", bridge, "type", "bridge")
    made = Machine(folder, manifests, image, dict(secrets), configuration, network)
    _ip("address", "add", f"{made.address}/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    try:
        yield made
    finally:
        for pod in made.pods:
            pod.kill()
        for number in range(10, 10 + len(made.pods)):
            _ip("netns", "delete", f"{bridge}n{number}")
        _ip("link", "delete", bridge)


def start_command(group: Mapping[str, Any], head: str | None, **more: str) -> list[str]:
    """Returns the command that KubeRay gives the container of a group.

    Args:
        head: the head's host; None for the head.
        more: further parameters of `ray start`.
    """
    container = group["template"]["spec"]["containers"][0]
    parameters = {"dashboard-agent-listen-port": "52365", "block": "true", **group["rayStartParams"], **more}
    role = "--head" if head is None else f"--address={head}:6379"
    memory = container["resources"]["limits"]["memory"]
    assert memory.endswith("Gi")
    flags = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in parameters.items()]
    if "num-cpus" not in parameters:
        flags.append(f"--num-cpus={container['resources']['limits']['cpu']}")
    line = " ".join(["ulimit -n 65536; ray start", role, *flags, f"--memory={int(memory[:-2]) * 2**30}"])
    return ["/bin/bash", "-c", "--", line]


def ray_environment(head: str, **more: str) -> list[str]:
    """Returns the variables that KubeRay adds, as options of podman: the cluster's token and where its head is.

    And one by which a node waits longer for a busy machine.
    """
    variables = {
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "FQ_RAY_IP": head,
        "RAY_IP": head,
        "RAY_PORT": "6379",
        **more,
    }
    return [f"--env={name}={value}" for name, value in variables.items()]


def _shown(command: Sequence[str], check: bool) -> "subprocess.CompletedProcess[str]":
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not check or ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def _namespace(name: str, address: str, bridge: str) -> None:
    _ip("netns", "add", name)
    _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", name, "master", bridge, "up")
    _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", name, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
