#!/bin/sh
# Boots Kubernetes on this machine and runs the manifests of deploy/kubernetes in it: make kubernetes-test.
#
# It needs root, Go, openssl and Debian's containerd, runc, containernetworking-plugins, iptables, nftables and
# conntrack. Kubernetes, etcd and helm are built from their modules (parts/go.mod) into
# ~/.cache/penstock-kubernetes, or $KUBERNETES_CACHE. Where there can be no node, an API server alone judges
# the manifests. What is started lives in namespaces that end with this script.
set -eu
cd "$(dirname "$0")"
: "${GO:=go}"
parts=${KUBERNETES_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/penstock-kubernetes}
parts=$parts/$(cat parts/go.mod parts/go.sum | sha256sum | cut -c1-12) # those of other versions may go
mkdir -p "$parts"
# part NAME PACKAGE: builds one unless it is there.
part() {
	[ ! -e "$parts/$1" ] || return 0
	echo "kubernetes-test: building $1"
	CGO_ENABLED=0 nice "$GO" build -C parts -p 2 -trimpath -buildvcs=false -o "$parts/$1.new" -ldflags "-s -w \
		-X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${version#*.} \
		-X k8s.io/component-base/version.gitVersion=$full" "$2"
	mv "$parts/$1.new" "$parts/$1"
}
full=$("$GO" list -C parts -m -f '{{.Version}}' k8s.io/kubernetes)
version=${full%.*}
part etcd go.etcd.io/etcd/server/v3
part helm helm.sh/helm/v3/cmd/helm
for name in kube-apiserver kubectl; do part $name k8s.io/kubernetes/cmd/$name; done
PATH=$parts:$PATH

missing=
[ "$(id -u)" = 0 ] || missing=" root"
for program in containerd ctr runc iptables nft conntrack unshare; do
	command -v $program >/dev/null || missing="$missing $program"
done
[ -x /usr/lib/cni/ptp ] || missing="$missing /usr/lib/cni/ptp"
if [ -n "$missing" ]; then
	echo "kubernetes-test: no node can run here without$missing; an API server alone judges the manifests"
	exec ../../deploy/kubernetes/validate.sh
fi
for name in kube-controller-manager kube-scheduler kubelet kube-proxy; do part $name k8s.io/kubernetes/cmd/$name; done

place=$(mktemp -d)
name=penstock-test-$$
# Controllers of version 1 each have a tree; version 2 has one.
trees=$(find /sys/fs/cgroup -maxdepth 2 -name cgroup.procs -exec dirname {} \;)
[ ! -e /sys/fs/cgroup/cgroup.controllers ] || trees=/sys/fs/cgroup
run=
finish() {
	[ -z "$run" ] || kill -KILL "$run" || true # which passes it on; unshare heeds no other signal
	for tree in $trees; do
		tries=0 # what was killed takes its time
		until [ ! -e "$tree/$name" ] || find "$tree/$name" -depth -type d -exec rmdir {} + 2>/dev/null; do
			tries=$((tries + 1))
			[ "$tries" -lt 50 ] || { echo "kubernetes-test: $tree/$name stays"; break; }
			sleep .2
		done
	done
	rm -rf "$place"
}
trap finish EXIT
trap 'exit 1' INT TERM HUP
for tree in $trees; do
	for dir in "$name" "$name/node1" "$name/node2"; do
		mkdir "$tree/$dir"
		for key in cpuset.cpus cpuset.mems; do # which begin empty in version 1
			[ ! -e "$tree/cpuset.cpus" ] || [ "$tree" = /sys/fs/cgroup ] || cat "$tree/$key" >"$tree/$dir/$key"
		done
	done
	# All pods together would count as one process beside those of this machine.
	[ ! -e "$tree/$name/cpu.shares" ] || echo 8192 >"$tree/$name/cpu.shares"
done
make -C ../.. --no-print-directory penstock BIN="$place/bin"
CGO_ENABLED=0 "$GO" build -o "$place/bin/pod" ./pod
"$GO" test -c -o "$place/kubernetes.test" .
ln -s "$parts"/* "$place/bin/"
export PENSTOCK_KUBERNETES="$place" PENSTOCK_KUBERNETES_CGROUP="/$name"
# The first process of the namespace takes the processes that others leave, so it is a shell. A kubelet sets
# kernel.panic and others of the whole machine: files of ours stand in for them.
# shellcheck disable=SC2016
unshare --mount --pid --fork --kill-child --mount-proc sh -eu -c '
	for dir in /run /var/log /var/lib/kubelet /var/lib/cni "$PENSTOCK_KUBERNETES/etcd"; do
		[ -d "$dir" ] || mkdir -p "$dir"
		mount -t tmpfs tmpfs "$dir"
	done
	for key in kernel/panic kernel/panic_on_oops vm/overcommit_memory vm/panic_on_oom kernel/keys/root_maxkeys \
		kernel/keys/root_maxbytes; do
		[ -e /proc/sys/$key ] || continue
		at="$PENSTOCK_KUBERNETES/$(echo $key | tr / .)"
		cat /proc/sys/$key >"$at"
		mount --bind "$at" /proc/sys/$key
	done
	"$@"
	exit $?
' sh "$place/kubernetes.test" -test.v -test.timeout 20m "$@" &
run=$!
status=0
wait "$run" || status=$?
run=
exit $status
