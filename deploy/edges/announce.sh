#!/bin/sh
# Announces this edge while its proxy is ready (/readyz), by bird2 with edge.conf.
#   announce.sh [arguments of penstock ready]
# BIRDC names another client of bird than birdc.
while :; do
	word=disable
	penstock ready "$@" >/dev/null 2>&1 && word=enable
	${BIRDC:-birdc} "$word" ready >/dev/null 2>&1
	sleep 1
done
