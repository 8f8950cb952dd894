#!/bin/sh
# restore.sh COPY DATABASE: restores a missing ledger, or the keys, from a copy. Stop the service first. No key is valid
# afterwards, because keys may have been revoked since the copy: `privmix keys rotate NAME` gives a key a new secret.
# KEEP_KEYS=yes keeps the secrets.
set -eu
copy=$1 database=$2
if [ -e "$database" ]; then
    echo "$database is there: it knows what was spent since $copy was made. Move it away first." >&2
    exit 1
fi
cp "$copy" "$database.part"
KEEP_KEYS=${KEEP_KEYS:-no} python - "$database.part" <<'KEYS'
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

with closing(sqlite3.connect(sys.argv[1])) as database:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if "privmix_keys" in tables and os.environ["KEEP_KEYS"] != "yes":
        with database:
            database.execute(
                "UPDATE privmix_keys SET hash = 'restored ' || id, previous_hash = NULL, previous_until = NULL"
            )
if "privmix_keys" not in tables or "privmix_ledger" in tables:
    sys.exit(subprocess.run(["privmix", "ledger", "verify", sys.argv[1]]).returncode)
KEYS
mv "$database.part" "$database"
