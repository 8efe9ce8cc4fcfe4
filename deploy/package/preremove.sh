#!/bin/sh
# Runs as root before the files go: "remove" (deb), 0 (rpm) or nothing (apk) when the
# package goes, another word at an upgrade.
set -e
case "${1:-remove}" in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
	systemctl disable --now penstock.service
elif command -v rc-service >/dev/null 2>&1; then
	rc-service --ifstarted penstock stop
	rc-update del penstock || true
fi
# Rules that capture would lead connections to a proxy that is no more.
/usr/bin/penstock rules remove || true
