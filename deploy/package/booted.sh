#!/bin/sh
# Boots a copy of this Debian under systemd (systemd-nspawn, gone afterwards), and installs, uses, upgrades and
# removes a deb there as an administrator does.
#   deploy/package/booted.sh DEB
# It needs root. What the machine's kernel is asked for is the machine's own.
set -eu
[ "$(id -u)" = 0 ] || { echo "package-test: run it as root"; exit 1; }
for program in systemd-nspawn python3 curl ip; do
	command -v "$program" >/dev/null || { echo "package-test: SKIPPED under systemd: $program is not there"; exit 0; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$1" "$work/first.deb"
# The next version is the same one under another name.
dpkg-deb -R "$1" "$work/next"
sed -i 's/^Version: .*/&+next/' "$work/next/DEBIAN/control"
dpkg-deb -Znone -b "$work/next" "$work/next.deb" >/dev/null
cat >"$work/steps" <<'STEPS'
set -eux
began=$(date +%s)
trap 'journalctl -u penstock -o cat --no-pager | tail -40' EXIT
say() { echo "package-test: $(($(date +%s) - began)) s: $*" >>/out/seen; }
main() { systemctl show penstock -p MainPID --value; }
mkdir /srv/files
head -c 20000000 /dev/urandom >/srv/files/file
want=$(sha256sum </srv/files/file)
ip link set lo up
ip netns add far # another host: the proxy leads nobody to its own
ip link add near type veth peer name eth0 netns far
ip address add 198.51.100.2/24 dev near
ip link set near up
ip -n far address add 198.51.100.1/24 dev eth0
ip -n far link set eth0 up
ip netns exec far python3 -m http.server 8000 --bind 198.51.100.1 --directory /srv/files &
download() { # through the proxy
	test "$(curl -sSf --retry 100 --retry-delay 1 --retry-connrefused -x socks5h://127.0.0.1:1080 \
		http://198.51.100.1:8000/file | sha256sum)" = "$want"
}
rm -f /var/lib/man-db/auto-update # which takes longer than all of this
dpkg -i /out/first.deb
mkdir -p /etc/systemd/system/penstock.service.d # shorter than the downloads below
printf '[Service]\nWatchdogSec=10s\n' >/etc/systemd/system/penstock.service.d/watchdog.conf
systemctl daemon-reload
systemctl enable --now penstock
test "$(stat -c %U "/proc/$(main)")" = penstock
download
say "installed; a download through it as the service, hash right"
echo "# mine" >>/etc/penstock/penstock.yaml
systemctl reload penstock
before=$(main)
failed() { systemctl show penstock -p NRestarts --value; }
for i in $(seq 50); do # 50 downloads of 20 seconds or more, with the upgrade in the middle
	curl -sSf --limit-rate 1M -x socks5h://127.0.0.1:1080 http://198.51.100.1:8000/file -o "/tmp/got$i" &
	downloads="${downloads:-} $!"
done
sleep 2
dpkg -i /out/next.deb
test "$(main)" != "$before"
test "$(readlink "/proc/$(main)/exe")" = /usr/bin/penstock
for i in $downloads; do wait "$i"; done
for i in $(seq 50); do test "$(sha256sum <"/tmp/got$i")" = "$want"; rm "/tmp/got$i"; done
test "$(failed)" = 0
say "upgraded under 50 downloads: every hash right, none reset"
echo small >/srv/files/small
systemctl restart penstock &
restart=$!
for i in $(seq 30); do # none is tried again
	curl -sSf -x socks5h://127.0.0.1:1080 http://198.51.100.1:8000/small | grep -qx small
	sleep .05
done
wait "$restart"
say "restarted: 30 of 30 new connections served, by the sockets that systemd keeps"
test "$(dpkg-query -W -f '${Version}' penstock)" = "$(cat /out/version)"
tail -1 /etc/penstock/penstock.yaml | grep "# mine"
download
say "upgraded: another process, the configuration as it was, a download through it"
dpkg -r penstock
test "$(systemctl is-active penstock)" = inactive
test ! -e /etc/systemd/system/multi-user.target.wants/penstock.service
test ! -e /usr/bin/penstock
test -e /etc/penstock/penstock.yaml
dpkg -P penstock
test ! -e /etc/penstock/penstock.yaml
test ! -e /var/lib/penstock
say "removed and purged: nothing runs, nothing is left"
echo passed >>/out/seen
STEPS
dpkg-deb -f "$work/next.deb" Version | tr -d '\n' >"$work/version"
cat >"$work/steps.service" <<'UNIT'
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'exec /bin/sh /out/steps >/out/log 2>&1'
ExecStopPost=/bin/systemctl poweroff --no-block
UNIT
mkdir "$work/tmp"
# shellcheck disable=SC2016
unshare --mount sh -eu -c '
	mount -t tmpfs tmpfs "$1"/tmp
	mkdir "$1"/tmp/upper "$1"/tmp/work "$1"/tmp/root
	mount -t overlay overlay -o lowerdir=/,upperdir="$1"/tmp/upper,workdir="$1"/tmp/work "$1"/tmp/root
	cp "$1"/steps.service "$1"/tmp/root/etc/systemd/system/
	exec timeout 300 systemd-nspawn -q -b -D "$1"/tmp/root -M "penstock-package-$$" --private-network --register=no \
		--keep-unit --bind="$1":/out systemd.unit=steps.service systemd.firstboot=no \
		systemd.mask=systemd-networkd-wait-online.service
' sh "$work" >"$work/boot" 2>&1 || true
[ -e "$work/log" ] || { echo "package-test: SKIPPED under systemd: no system can be booted here:"; tail -5 "$work/boot"; exit 0; }
cat "$work/seen" 2>/dev/null || true
grep -qx passed "$work/seen" || { tail -80 "$work/log"; exit 1; }
