#!/bin/sh
# Fails where a test was run again that does not run over an emulated link: one of files, flags or sockets that
# fails once is wrong, or what it tests is.
#   check.sh REPORT OUTPUT    as gotestsum writes them with --rerun-fails-report and --jsonfile
set -e
links=$(mktemp)
trap 'rm -f "$links"' EXIT
# need.OverLink logs this line in the test or in one below it.
sed -n 's/.*"Package":"\([^"]*\)","Test":"\([^"/]*\).*runs over an emulated link.*/\1.\2/p' "$2" | sort -u > "$links"
[ -e "$1" ] || exit 0 # nothing was run again
again=$(sed -nE 's/\.((Test|Fuzz|Example)[A-Za-z0-9_]*).*/.\1/p' "$1" | sort -u | grep -vxF -f "$links" || true)
[ -n "$again" ] || exit 0
echo "FAIL: failed and passed when run again, which is for tests over emulated links alone:"
echo "$again"
exit 1
