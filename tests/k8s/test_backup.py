"""Claim: the scripts of the backup components, run like the CronJobs, back up and restore a complete ledger."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.budget.export import verify
from services.budget.ledger import Ledger
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import read
from tests.k8s.manifests import K8S, Manifests
from tests.postgresql import Server
from tests.services.budget.events import COARSE

TERMS = PrivacyBudget(ensemble="clinic", epsilon=8.0, delta=1e-5, order=8.0, adjacency="one part added or removed")


def script(component: str, name: str, *arguments: str, path: Path | None = None, **environment: str) -> str:
    """Runs a script with this installation's `privmix` and `python` and the programs at `path`; returns its output."""
    programs = os.pathsep.join(map(str, filter(None, (path, Path(sys.executable).parent, os.environ["PATH"]))))
    command = ["sh", str(K8S / "components" / component / name), *arguments]
    environment = {**os.environ, **environment, "PATH": programs}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_a_sqlite_ledger_in_use_is_copied_and_restored(tmp_path: Path) -> None:
    place, backups = tmp_path / "first.db", tmp_path / "backup"
    backups.mkdir()
    ledger = Ledger(place, TERMS)
    ledger.lease(COARSE, 3)
    copy = Path(script("backup-sqlite", "backup.sh", str(place), str(backups)).splitlines()[-1])
    before = read(place)
    assert [copy] == list(backups.iterdir())

    with pytest.raises(subprocess.CalledProcessError):
        script("backup-sqlite", "restore.sh", str(copy), str(place))
    for file in tmp_path.glob("first.db*"):
        file.unlink()
    script("backup-sqlite", "restore.sh", str(copy), str(place))
    assert read(place) == before
    assert Ledger(place, TERMS).lease(COARSE, 1).count == 1


def test_a_damaged_sqlite_ledger_is_not_kept_as_a_backup(tmp_path: Path) -> None:
    place, backups = tmp_path / "first.db", tmp_path / "backup"
    backups.mkdir()
    place.write_bytes(b"no ledger")
    with pytest.raises(subprocess.CalledProcessError):
        script("backup-sqlite", "backup.sh", str(place), str(backups))
    assert not list(backups.glob("*.db"))


def test_only_the_last_copies_are_kept(tmp_path: Path) -> None:
    place, backups = tmp_path / "first.db", tmp_path / "backup"
    backups.mkdir()
    Ledger(place, TERMS)
    for day in (1, 2, 3):
        (backups / f"first-2026010{day}T000000Z.db").touch()
    (backups / "other-20260101T000000Z.db").touch()
    newest = script("backup-sqlite", "backup.sh", str(place), str(backups), KEPT="2").splitlines()[-1]
    kept = {file.name for file in backups.iterdir()}
    assert kept == {Path(newest).name, "first-20260103T000000Z.db", "other-20260101T000000Z.db"}


@pytest.mark.slow
@pytest.mark.long
def test_a_ledger_in_postgresql_is_dumped_and_restored(postgresql: Server, tmp_path: Path) -> None:
    first, second = postgresql.database(), postgresql.database()
    ledger = Ledger(first, TERMS)
    ledger.lease(COARSE, 3)
    copy = script("backup-postgresql", "backup.sh", str(tmp_path), path=postgresql.binaries, LEDGER=first).strip()

    script("backup-postgresql", "restore.sh", copy, path=postgresql.binaries, LEDGER=second)
    assert read(second) == read(first)
    assert verify(second).rows == 3
    assert Ledger(second, TERMS).lease(COARSE, 1).count == 1
    with pytest.raises(subprocess.CalledProcessError):  # there is a ledger now
        script("backup-postgresql", "restore.sh", copy, path=postgresql.binaries, LEDGER=second)


@pytest.mark.slow
@pytest.mark.long
def test_a_database_without_a_ledger_makes_no_backup(postgresql: Server, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        script("backup-postgresql", "backup.sh", str(tmp_path), path=postgresql.binaries, LEDGER=postgresql.database())
    assert not list(tmp_path.glob("*.dump"))


def test_the_job_runs_the_script_on_the_ledger_of_the_configuration(manifests: Manifests) -> None:
    (pod,) = manifests.job_pods()
    (container,) = pod["spec"]["containers"]
    assert container["command"][:2] == ["sh", "/scripts/backup.sh"]
    if manifests.overlay == "cpu-dev":
        assert f"ledger: {container['command'][2]}" in manifests.configuration()
    else:
        (variable,) = container["env"]
        assert variable["valueFrom"]["secretKeyRef"] == {"name": "privmix-ledger", "key": "url"}
