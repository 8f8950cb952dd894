#!/bin/sh
# restore.sh COPY: restores a dump into the empty database at the URL in $LEDGER. It fails if the database has a
# ledger, because that ledger has the charges since the dump. No key is valid afterwards, because keys may have been
# revoked since the dump: `privmix keys rotate NAME` gives a key a new secret. KEEP_KEYS=yes keeps the secrets.
set -eu
pg_restore --exit-on-error --single-transaction --no-owner --dbname="$LEDGER" "$1"
if [ "${KEEP_KEYS:-no}" != yes ]; then
    psql --no-psqlrc --quiet --set=ON_ERROR_STOP=1 "$LEDGER" <<'SQL'
DO $$ BEGIN
    IF to_regclass('privmix_keys') IS NOT NULL THEN
        UPDATE privmix_keys SET hash = 'restored ' || id, previous_hash = NULL, previous_until = NULL;
    END IF;
END $$;
SQL
fi
