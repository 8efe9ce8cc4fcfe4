#!/bin/sh
# Keeps the nexthop groups 4 (IPv4) and 6 (IPv6) to the edges that announce themselves, by bird2 with router.conf.
#   nexthops.sh FILE
# Each line of FILE is an edge: MARKER GATEWAY4 GATEWAY6 DEVICE. Routes that lead to the edges name a group:
#   ip route add default nhid 4; ip -6 route add default nhid 6
set -eu
before=
while :; do
	ready='' number=0
	while read -r marker four six device; do
		number=$((number + 1))
		[ -n "$(ip route show table 88 "$marker" 2>/dev/null)" ] || continue
		ready="$ready $number"
		case " $before " in *" $number "*) continue ;; esac
		ip nexthop replace id "4$number" via "$four" dev "$device"
		ip nexthop replace id "6$number" via "$six" dev "$device"
	done <"$1"
	if [ "$ready" != "$before" ] && [ -n "$ready" ]; then # an empty group cannot be
		for family in 4 6; do
			members=
			for number in $ready; do members=$members/$family$number; done
			# A flow that sends nothing for idle_timer seconds may get another edge when one comes back.
			ip nexthop replace id "$family" group "${members#/}" type resilient buckets 256 idle_timer 7200
		done
		before=$ready
	fi
	sleep 1
done
