"""Claim: a cluster that a command starts listens on loopback, and runs nothing without the token."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from privmix.foundation import ray_session
from privmix.foundation.errors import WorkError

STARTED = """
import os, subprocess, sys
import psutil, ray
from privmix.foundation.ray_session import secure

secure(None)
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)

@ray.remote
class Named:
    def answer(self):
        return 42

actor = Named.options(name="named", namespace="n").remote()
ray.get(actor.answer.remote())
here = psutil.Process()
for process in (here, *here.children(recursive=True)):
    for connection in process.net_connections(kind="inet"):
        if connection.status == psutil.CONN_LISTEN:
            print("listens", connection.laddr.ip.removeprefix("::ffff:"))
address = ray.get_runtime_context().gcs_address
for mode in ("", "disabled"):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    joined = subprocess.run(
        [sys.executable, "-c", sys.argv[1], address],
        env={**environment, **({"RAY_AUTH_MODE": mode} if mode else {})},
        capture_output=True,
        text=True,
        timeout=60,
    )
    print("joined" if "found 42" in joined.stdout else "refused")
"""
JOINS = """
import sys
import ray
from privmix.foundation.ray_session import secure

secure(sys.argv[1])
ray.init(sys.argv[1], log_to_driver=False)
print("found", ray.get(ray.get_actor("named", "n").answer.remote()))
"""


@pytest.mark.slow
def test_a_cluster_of_ones_own_listens_on_loopback_and_asks_for_its_token(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    root = Path(__file__).parents[3]
    packages = f"{root / 'services'}{os.pathsep}{root / 'cluster'}"
    home = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": packages}
    ran = subprocess.run(
        [sys.executable, "-c", STARTED, JOINS],
        env={**environment, **home},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    said = ran.stdout.splitlines()
    listened = {line.removeprefix("listens ") for line in said if line.startswith("listens")}
    assert listened == {"127.0.0.1"}
    assert [line for line in said if not line.startswith("listens")] == ["joined", "refused"]
    token = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets a test say what starting Ray does."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_session, "secure", lambda address: None)
    return monkeypatch


def test_no_worker_inherits_the_settings_of_the_environment(without_ray: pytest.MonkeyPatch) -> None:
    secret = "PRIVMIX_HTTP__API_KEYS", "PRIVMIX_KEYS__DATABASE", "PRIVMIX_BUDGET__LEDGER"
    for name in (*secret, "PRIVMIX_CACHE"):
        without_ray.setenv(name, "value")
    seen: dict[str, str] = {}
    without_ray.setattr(ray, "init", lambda **_: seen.update(os.environ))
    with ray_session.connected("auto"):
        assert all(os.environ[name] == "value" for name in secret), "the command itself reads them"
    assert not set(secret) & set(seen)
    assert seen["PRIVMIX_CACHE"] == "value"


def test_a_local_address_starts_a_cluster_of_ones_own(without_ray: pytest.MonkeyPatch) -> None:
    """Ray would listen on all addresses, with a dashboard and a token file that others can read."""
    told: list[object] = []
    without_ray.setenv("RAY_ADDRESS", "local")
    without_ray.setattr(ray, "init", lambda **options: told.append(options["include_dashboard"]))
    without_ray.setattr(ray_session, "secure", told.append)
    with ray_session.connected():
        assert told == [None, False]


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "[::1]:9"])
def test_a_dead_cluster_is_named(address: str) -> None:
    with pytest.raises(WorkError, match=re.escape(f"not be reached at {address} (--address or RAY_ADDRESS)")):
        ray_session.wait_for(address, patience_s=0)


def test_a_cluster_that_cannot_be_started_says_where_its_files_are(without_ray: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise OSError("AF_UNIX path length cannot exceed 107 bytes")

    without_ray.setattr(ray, "init", init)
    with pytest.raises(WorkError, match=r"its files in RAY_TMPDIR or TMPDIR .*: AF_UNIX"), ray_session.connected():
        pass


def test_what_ray_says_while_it_connects_is_no_result(
    without_ray: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as its warning of many processes, which it prints at any moment."""
    without_ray.setattr(ray, "init", lambda **_: print("a warning"))
    without_ray.setattr(ray, "shutdown", lambda: print("another"))
    with ray_session.joined("auto"):
        pass
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "a warning\nanother\n")
