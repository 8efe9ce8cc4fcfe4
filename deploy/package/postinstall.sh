#!/bin/sh
# Runs as root after the files are there, at the first installation and at each upgrade.
set -e
if command -v systemd-sysusers >/dev/null 2>&1; then
	systemd-sysusers penstock.conf || true
fi
if ! getent group penstock >/dev/null 2>&1; then
	if command -v groupadd >/dev/null 2>&1; then groupadd -r penstock; else addgroup -S penstock; fi
fi
if ! getent passwd penstock >/dev/null 2>&1; then
	if command -v useradd >/dev/null 2>&1; then
		useradd -r -g penstock -d / -s /usr/sbin/nologin penstock
	else
		adduser -S -D -H -h / -s /sbin/nologin -G penstock penstock
	fi
fi
if [ -e /etc/penstock/penstock.yaml ]; then # whoever has removed it does without
	chgrp penstock /etc/penstock/penstock.yaml
fi
# An upgrade: the new program takes over from what runs. Where it cannot, as with tunnels or a first version that does
# not know how, connections end in the time of shutdown.drain.
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	if systemctl is-active --quiet penstock.service; then
		systemctl reload penstock.service || systemctl try-restart penstock.service
	fi
elif command -v rc-service >/dev/null 2>&1; then
	rc-service --ifstarted penstock restart || true
fi
echo "penstock: edit /etc/penstock/penstock.yaml, then: systemctl enable --now penstock (or rc-update add penstock)"
