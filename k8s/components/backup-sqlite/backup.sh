#!/bin/sh
# backup.sh LEDGER DIRECTORY: copies a SQLite ledger while it is in use, and keeps the copy if its hash chain is valid.
set -eu
ledger=$1 directory=$2 kept=${KEPT:-168}
name=$(basename "$ledger" .db)
copy=$directory/$name-$(date -u +%Y%m%dT%H%M%SZ).db
python - "$ledger" "$copy.part" <<'COPY'
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

source, destination = sys.argv[1:]
existing = f"{Path(source).absolute().as_uri()}?mode=rw"
with closing(sqlite3.connect(existing, uri=True)) as ledger, closing(sqlite3.connect(destination)) as copy:
    ledger.execute("PRAGMA query_only = ON")
    ledger.backup(copy)
    copy.execute("PRAGMA journal_mode = DELETE")
COPY
privmix ledger verify "$copy.part"
mv "$copy.part" "$copy"
ls -1 "$directory/$name"-*.db | sort -r | tail -n "+$((kept + 1))" | xargs -r rm --
echo "$copy"
