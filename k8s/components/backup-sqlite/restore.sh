#!/bin/sh
# restore.sh COPY LEDGER: restores a missing ledger from a copy. Stop the service first.
set -eu
copy=$1 ledger=$2
if [ -e "$ledger" ]; then
    echo "$ledger is there: it knows what was spent since $copy was made. Move it away first." >&2
    exit 1
fi
privmix ledger verify "$copy"
cp "$copy" "$ledger.part"
mv "$ledger.part" "$ledger"
