"""Claim: a waiting shard makes Ray's autoscaler add a node."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from privmix.fleet.fleet import FleetActor, FleetSettings
from privmix.fleet.shard_map import ShardMap, Size
from tests.services.fleet.plans import SETTINGS, plans

PATIENCE_S = 180.0

PORT = 6379
"""The port at which Ray's provider of local nodes expects the head."""
COMMANDS = (
    "cluster_synced_files",
    "initialization_commands",
    *(f"{who}setup_commands" for who in ("", "head_", "worker_")),
    *(f"{who}_start_ray_commands" for who in ("head", "worker")),
)
"""The commands that a configuration of a cluster of real machines contains."""

pytestmark = pytest.mark.slow


@pytest.fixture
def autoscaled(tmp_path: Path) -> Iterator[str]:
    """The address of a Ray cluster whose autoscaler adds nodes of one CPU, each a raylet on this machine."""
    node = {"resources": {"CPU": 1}, "node_config": {}}
    config = {
        "cluster_name": "autoscaled",
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {**node, "max_workers": 0},
            "worker": {**node, "min_workers": 0, "max_workers": 2},
        },
        "head_node_type": "ray.head.default",
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in COMMANDS},
    }
    (file := tmp_path / "autoscaling.json").write_text(json.dumps(config))
    ray_command = Path(sys.executable).with_name("ray")
    command = [str(ray_command), "start", "--head", "--block", "--num-cpus=1", f"--port={PORT}"]
    process = subprocess.Popen(
        [*command, f"--autoscaling-config={file}"],
        env={
            "RAY_AUTH_MODE": "disabled",  # an earlier start in this process may have turned authentication on
            **os.environ,
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        },
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"{ray.util.get_node_ip_address()}:{PORT}"
    finally:
        ray.shutdown()
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # the process ended with its parent
                child.kill()
        process.kill()
        process.wait()


def test_a_shard_that_waits_makes_the_autoscaler_add_a_node(
    autoscaled: str, public_model: Path, adapters: dict[str, Path]
) -> None:
    connect(autoscaled)
    settings = FleetSettings("growing", plans(public_model, adapters, num_cpus=1.0), SETTINGS, None, ())
    fleet = FleetActor.options(name="fleet", namespace="growing").remote(settings, Size(1))
    ray.get(fleet.start.remote())
    shard_map: ShardMap = ray.get(fleet.scale.remote(2), timeout=PATIENCE_S)
    assert shard_map.protocol.parts == 2
    assert ray.cluster_resources()["CPU"] == 2


def connect(address: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            ray.init(address, log_to_driver=False)
            return
        except ConnectionError:
            assert time.monotonic() < deadline, "Ray did not start"
            time.sleep(0.5)
