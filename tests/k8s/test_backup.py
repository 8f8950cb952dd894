"""Claim: the scripts of the backup components, run like the CronJobs, back up and restore a complete ledger."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from privmix.budget.ledger import Ledger
from privmix.budget.reading import read
from privmix.database.service import ServiceDatabase
from privmix.foundation.errors import KeysError
from privmix.keys.records import Share
from tests.k8s.manifests import K8S
from tests.key_store import RequestStore
from tests.postgresql import Server
from tests.services.budget.events import COARSE
from tests.support.terms import CLINIC as TERMS


def script(component: str, name: str, *arguments: str, path: Path | None = None, **environment: str) -> str:
    """Runs a script with this installation's `privmix` and `python` and the programs at `path`; returns its output."""
    programs = os.pathsep.join(map(str, filter(None, (path, Path(sys.executable).parent, os.environ["PATH"]))))
    command = ["sh", str(K8S / "components" / component / name), *arguments]
    environment = {**os.environ, **environment, "PATH": programs}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_all_databases_of_a_volume_are_copied_and_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    volume, backups = tmp_path / "ledger", tmp_path / "backup"
    for folder in (volume, backups):
        folder.mkdir()
    Ledger.create(volume / "first.db", TERMS).lease(COARSE, 3)
    Ledger.create(volume / "second.db", TERMS).lease(COARSE, 4)
    (volume / "broken.db").write_bytes(b"no ledger")
    keys = RequestStore(ServiceDatabase(volume / "keys.db"))
    _, secret = keys.create("team", share=Share(tokens=9))
    (backups / "first-20260101T000000Z.db.part").touch()
    (backups / "broken-20260101T000000Z.db").touch()
    (backups / "broken-20260102T000000Z.db").touch()
    with pytest.raises(subprocess.CalledProcessError):
        script("backup-sqlite", "backup.sh", str(volume), str(backups), KEPT="1")
    copies = {file.name.partition("-")[0]: file for file in backups.iterdir()}
    assert len(copies) == len(list(backups.iterdir())), "no partial file, and a broken ledger's copies are pruned"
    assert copies["broken"].name == "broken-20260102T000000Z.db"
    assert read(copies["second"]).charged == {COARSE: 4}

    script("backup-sqlite", "restore.sh", str(copies["keys"]), str(tmp_path / "restored.db"))
    restored = RequestStore(ServiceDatabase(tmp_path / "restored.db"))
    assert restored.account("team").key.share == Share(tokens=9)
    assert restored.required()
    assert restored.find(secret.hash) is None, "it may have been revoked since"
    _, rotated = restored.rotate("team")
    assert restored.find(rotated.hash) is not None
    assert restored.find("restored " + restored.account("team").key.id) is None
    script("backup-sqlite", "restore.sh", str(copies["keys"]), str(tmp_path / "kept.db"), KEEP_KEYS="yes")
    assert RequestStore(ServiceDatabase(tmp_path / "kept.db")).find(secret.hash) is not None


def test_a_key_that_was_revoked_stays_revoked_after_a_restore(tmp_path: Path) -> None:
    backups = tmp_path / "backup"
    backups.mkdir()
    keys = RequestStore(ServiceDatabase(tmp_path / "keys.db"))
    secrets = {name: keys.create(name)[1] for name in ("before", "after")}
    keys.revoke("before")
    copy = script("backup-sqlite", "backup.sh", str(tmp_path / "keys.db"), str(backups)).strip()
    keys.revoke("after")
    script("backup-sqlite", "restore.sh", copy, str(tmp_path / "restored.db"))
    restored = RequestStore(ServiceDatabase(tmp_path / "restored.db"))
    assert [restored.find(secret.hash) for secret in secrets.values()] == [None, None]
    assert restored.account("before").key.revoked
    with pytest.raises(KeysError, match="revoked"):
        restored.rotate("before")


def test_only_the_last_copies_are_kept(tmp_path: Path) -> None:
    place, backups = tmp_path / "first.db", tmp_path / "backup"
    backups.mkdir()
    Ledger.create(place, TERMS)
    for day in (1, 2, 3):
        (backups / f"first-2026010{day}T000000Z.db").touch()
    (backups / "other-20260101T000000Z.db").touch()
    (backups / "first-2-20260101T000000Z.db").touch()  # of the database first-2.db
    newest = script("backup-sqlite", "backup.sh", str(place), str(backups), KEPT="2").splitlines()[-1]
    kept = {file.name for file in backups.iterdir()}
    others = {"other-20260101T000000Z.db", "first-2-20260101T000000Z.db"}
    assert kept == {Path(newest).name, "first-20260103T000000Z.db", *others}


@pytest.mark.slow
def test_further_databases_are_dumped_and_one_failure_does_not_stop_them(postgresql: Server, tmp_path: Path) -> None:
    first, second = postgresql.database(), postgresql.database()
    Ledger.create(second, TERMS).lease(COARSE, 3)
    _, secret = RequestStore(ServiceDatabase(second)).create("team")
    ledgers = {"LEDGER": first, "LEDGER_SECOND": second}
    with pytest.raises(subprocess.CalledProcessError):
        script("backup-postgresql", "backup.sh", str(tmp_path), path=postgresql.binaries, **ledgers)
    (copy,) = tmp_path.iterdir()
    assert copy.name.startswith("second-")
    third = postgresql.database()
    script("backup-postgresql", "restore.sh", str(copy), path=postgresql.binaries, LEDGER=third)
    assert read(third).charged == {COARSE: 3}
    assert RequestStore(ServiceDatabase(third)).find(secret.hash) is None
