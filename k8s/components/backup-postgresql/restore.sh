#!/bin/sh
# restore.sh COPY: restores a dump into the empty database at the URL in $LEDGER. It fails if the database has a
# ledger, because that ledger has the charges since the dump.
set -eu
pg_restore --exit-on-error --single-transaction --no-owner --dbname="$LEDGER" "$1"
