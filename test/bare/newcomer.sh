#!/bin/sh
# What a newcomer enters: from a clone to the first managed download, and to what it gained on an emulated link. Nothing
# is built before, and modules come from GOPROXY. test/bare/run.sh has the machine for it:
#   make newcomer-test
# It fails where the answer takes longer than five minutes.
set -eu
most=300
from=$(pwd)
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
export GOCACHE="$work/cache" GOMODCACHE="$work/modules" GOFLAGS=-buildvcs=false
begin=$(date +%s)
cd "$work"
enter() {
	echo "newcomer: $(($(date +%s) - begin)) s: $*"
	"$@"
}
enter git clone -q "$from" penstock
enter cd penstock
enter make demo >"$work/said" 2>&1 || { cat "$work/said"; exit 1; }
took=$(($(date +%s) - begin))
# The row of Penstock is the managed download. It ends with the delay that was gained against the server's own Cubic.
grep -E '^penstock .* 1/[0-9.]+$' "$work/said" || {
	cat "$work/said"
	echo "newcomer: FAILED: nothing says what was gained"
	exit 1
}
echo "newcomer: three commands and $took s from the clone to the answer, of five and $most"
[ "$took" -le "$most" ]
