#!/bin/sh
# backup.sh SOURCE DIRECTORY: copies a SQLite ledger, or all databases (*.db) of a directory: ledgers
# and the keys. They may be in use. Keeps a copy of a ledger if its hash chain is valid.
# One failure does not stop the others.
set -u
source=$1 directory=$2 kept=${KEPT:-168} failed=0
TIME='[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]T[0-9]*Z' # not the copies of a database whose name begins alike

backup() {
    name=$(basename "$1" .db)
    copy=$directory/$name-$(date -u +%Y%m%dT%H%M%SZ).db
    rm -f "$directory/$name"-$TIME.db.part
    python - "$1" "$copy.part" <<'COPY' && mv "$copy.part" "$copy" && echo "$copy"
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

source, destination = sys.argv[1:]
existing = f"{Path(source).absolute().as_uri()}?mode=rw"
with closing(sqlite3.connect(existing, uri=True)) as database, closing(sqlite3.connect(destination)) as copy:
    database.execute("PRAGMA query_only = ON")
    database.backup(copy)
    copy.execute("PRAGMA journal_mode = DELETE")
    tables = {name for (name,) in copy.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    (intact,) = copy.execute("PRAGMA integrity_check").fetchone()
if intact != "ok":
    sys.exit(f"{source}: {intact}")
if "privmix_keys" not in tables or "privmix_ledger" in tables:
    sys.exit(subprocess.run(["privmix", "ledger", "verify", destination]).returncode)
COPY
    status=$?
    rm -f "$copy.part"
    ls -1 "$directory/$name"-$TIME.db 2>/dev/null | sort -r | tail -n "+$((kept + 1))" | xargs -r rm --
    return $status
}

if [ -d "$source" ]; then
    for database in "$source"/*.db; do
        backup "$database" || failed=1
    done
else
    backup "$source" || failed=1
fi
exit $failed
