#!/bin/sh
# Runs as root before the files go: with "remove" (deb), 0 (rpm) or the version (apk) when the
# package goes, with another word (deb) or how many versions stay (rpm) at an upgrade.
set -e
case "${1:-}" in
upgrade | failed-upgrade | deconfigure | [1-9]) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
	systemctl disable --now penstock.service
elif command -v rc-service >/dev/null 2>&1; then
	rc-service --ifstarted penstock stop
	rc-update del penstock || true
fi
# Rules that capture would lead connections to a proxy that is no more.
/usr/bin/penstock rules remove || true
