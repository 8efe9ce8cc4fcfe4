#!/bin/sh
# Runs "make test", or the command given, in a bare Debian: debootstrap's minbase with make, git, ca-certificates and
# the Go toolchain of this machine. It has no /etc/hosts, C compiler, Python, curl, ip or nft. The command runs as
# root and then as an ordinary user, each in a copy of the committed tree with the uncommitted changes of its files.
#   test/bare/run.sh [COMMAND [ARGUMENT]...]
# It needs root, debootstrap, unshare and Go. AS names who runs the command (default: "root user"): "chrooted" is the
# user where no user namespace can be made, because the kernel refuses them in a chroot. BARE_ROOT names a directory
# where the root is made and kept, so that the next call starts at once (default: a temporary one).
# Packages come from the mirror that apt uses here. Modules come from this machine's module cache.
set -eu
release=bookworm
skip() {
	echo "bare-test: SKIPPED: $*"
	exit 0
}
say() { echo "bare-test: $(date +%T): $*"; }
[ "$(id -u)" = 0 ] || skip "run it as root"
for program in debootstrap unshare pivot_root git go; do
	command -v "$program" >/dev/null || skip "$program is not there"
done
mirror=$(apt-get indextargets --format '$(REPO_URI)' "Codename: $release" 'Created-By: Packages' | head -1)
[ -n "$mirror" ] || skip "apt has no repository of $release here"
[ $# -gt 0 ] || set -- make test

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
root=${BARE_ROOT:-$work/root}
if [ ! -e "$root/made" ]; then
	say "making a bare Debian $release in $root"
	mkdir -p "$root"
	debootstrap --variant=minbase --include=make,git,ca-certificates "$release" "$root" "$mirror" |
		sed 's/^/bare-test: /'
	rm -f "$root/etc/hosts"
	chroot "$root" useradd --create-home --shell /bin/sh user
	mkdir -p "$root/usr/local/go" "$root/modules" "$root/old"
	touch "$root/made"
fi

# Modules that the tests need and the tree's module file does not name, gotestsum's, are fetched by make's own command.
say "fetching modules into this machine's module cache"
go mod download
make -s test-tool
git diff HEAD --binary >"$work/changes"
cat >"$work/start" <<'START'
# start ROOT GOROOT MODULES USER HOME AS COMMAND...: runs COMMAND as USER in ROOT, which becomes this namespace's root,
# unless AS is chrooted.
set -eu
root=$1 go=$2 modules=$3 user=$4 home=$5 as=$6
shift 6
mount --rbind "$root" "$root"
cd "$root"
mount --bind -o ro "$go" usr/local/go
mount --bind -o ro "$modules" modules
mount --rbind /dev dev
mount --rbind /sys sys
mount -t proc proc proc
mount -t tmpfs tmpfs tmp
enter=
if [ "$as" = chrooted ]; then
	enter="chroot ."
else
	pivot_root . old
	umount -l /old
fi
# shellcheck disable=SC2086 # it is two words, or none
exec $enter setpriv --reuid "$user" --regid "$user" --init-groups env -i HOME="$home" USER="$user" LANG=C.UTF-8 \
	PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
	GOPROXY=file:///modules/cache/download GOSUMDB=off GOTOOLCHAIN=local \
	sh -c 'cd "$HOME/penstock" && exec "$@"' sh "$@"
START
failed=
for as in ${AS:-root user}; do
	user=$as
	[ "$as" != chrooted ] || user=user
	home=$(chroot "$root" getent passwd "$user" | cut -d: -f6)
	rm -rf "$root$home/penstock"
	git clone -q --no-hardlinks . "$root$home/penstock"
	git -C "$root$home/penstock" apply --allow-empty --index "$work/changes"
	chroot "$root" chown -R "$user:$user" "$home/penstock"
	say "as $as: $*"
	if unshare --mount --pid --fork --kill-child sh "$work/start" "$root" "$(go env GOROOT)" "$(go env GOMODCACHE)" \
		"$user" "$home" "$as" "$@"; then
		say "as $as: passed"
	else
		say "as $as: FAILED with $?"
		failed="$failed $as"
	fi
done
[ -z "$failed" ] || { say "FAILED as$failed"; exit 1; }
say "passed"
