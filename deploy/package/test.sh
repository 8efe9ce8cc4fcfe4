#!/bin/sh
# Installs a deb, runs the proxy as its user, upgrades, removes and purges it, in a copy of
# this Debian's files that is thrown away (overlayfs in a mount namespace).
#   deploy/package/test.sh DEB
# It needs root. Here no init runs; booted.sh has systemd run the service.
set -eu
[ "$(id -u)" = 0 ] || { echo "package-test: run it as root"; exit 1; }
deb=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tmp"
cat >"$work/steps" <<'STEPS'
set -eux
rm -f /var/lib/man-db/auto-update # which takes longer than all of this
dpkg -i /penstock.deb
getent passwd penstock
test "$(stat -c %U:%G:%a /etc/penstock/penstock.yaml)" = root:penstock:640
test -s /usr/share/man/man1/penstock-run.1.gz
test -s /usr/share/bash-completion/completions/penstock
penstock check /etc/penstock/penstock.yaml
ip link set lo up
setpriv --reuid penstock --regid penstock --clear-groups penstock run --config /etc/penstock/penstock.yaml &
proxy=$!
for i in $(seq 100); do penstock ready && break; sleep .2; done
penstock ready
penstock top --once
echo "# mine" >>/etc/penstock/penstock.yaml
dpkg -i /penstock.deb
tail -1 /etc/penstock/penstock.yaml | grep "# mine"
kill "$proxy"
wait "$proxy"
dpkg -r penstock
test ! -e /usr/bin/penstock
test -e /etc/penstock/penstock.yaml
dpkg -P penstock
test ! -e /etc/penstock/penstock.yaml
STEPS
unshare --mount --net sh -eu -c '
	mount -t tmpfs tmpfs "$1"/tmp
	mkdir "$1"/tmp/upper "$1"/tmp/work "$1"/tmp/root
	mount -t overlay overlay -o lowerdir=/,upperdir="$1"/tmp/upper,workdir="$1"/tmp/work "$1"/tmp/root
	mount --rbind /dev "$1"/tmp/root/dev
	mount -t proc proc "$1"/tmp/root/proc
	rm -rf "$1"/tmp/root/run/systemd
	cp "$2" "$1"/tmp/root/penstock.deb
	cp "$1"/steps "$1"/tmp/root/steps
	chroot "$1"/tmp/root /bin/sh /steps
' sh "$work" "$deb"
echo "package-test: passed"
