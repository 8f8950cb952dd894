#!/bin/sh
# backup.sh DIRECTORY: dumps the ledger's database at the URL in $LEDGER, with the functions that guard its table.
set -eu
directory=$1 kept=${KEPT:-168}
copy=$directory/ledger-$(date -u +%Y%m%dT%H%M%SZ).dump
pg_dump --format=custom --no-owner --file="$copy.part" "$LEDGER"
pg_restore --list "$copy.part" | grep -q 'TABLE DATA .* privmix_ledger ' || {
    echo "$LEDGER has no ledger" | sed 's#://[^@]*@#://#' >&2
    exit 1
}
mv "$copy.part" "$copy"
ls -1 "$directory"/ledger-*.dump | sort -r | tail -n "+$((kept + 1))" | xargs -r rm --
echo "$copy"
