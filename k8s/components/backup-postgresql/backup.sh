#!/bin/sh
# backup.sh DIRECTORY: dumps the databases at the URLs in $LEDGER and in every variable LEDGER_NAME (the ledgers of further
# ensembles, and the keys' database if it is another one), with the functions that guard a ledger's table.
# One failure does not stop the others.
set -u
directory=$1 kept=${KEPT:-168} failed=0
TIME='[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]T[0-9]*Z' # not the copies of a database whose name begins alike

backup() {
    name=$1 url=$2
    copy=$directory/$name-$(date -u +%Y%m%dT%H%M%SZ).dump
    rm -f "$directory/$name"-$TIME.dump.part
    pg_dump --format=custom --no-owner --file="$copy.part" "$url" &&
        pg_restore --list "$copy.part" >"$copy.list.part" &&
        grep -Eq 'TABLE DATA .* privmix_(ledger|keys) ' "$copy.list.part" &&
        mv "$copy.part" "$copy" && echo "$copy"
    status=$?
    rm -f "$copy.part" "$copy.list.part"
    if [ $status -ne 0 ]; then
        echo "$url was not backed up: it does not answer, has no ledger and no keys, or the volume is full" |
            sed 's#://[^@]*@#://#' >&2
    fi
    ls -1 "$directory/$name"-$TIME.dump 2>/dev/null | sort -r | tail -n "+$((kept + 1))" | xargs -r rm --
    return $status
}

backup ledger "$LEDGER" || failed=1
for variable in $(env | sed -n 's/^\(LEDGER_[A-Z0-9_]*\)=.*/\1/p'); do
    name=$(echo "${variable#LEDGER_}" | tr 'A-Z_' 'a-z-')
    backup "$name" "$(eval "echo \"\$$variable\"")" || failed=1
done
exit $failed
