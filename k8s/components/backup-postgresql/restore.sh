#!/bin/sh
# restore.sh COPY: puts a dump into the empty database at the URL in $LEDGER. It fails where there is a ledger: that
# one knows what was spent since the dump was made.
set -eu
pg_restore --exit-on-error --single-transaction --no-owner --dbname="$LEDGER" "$1"
