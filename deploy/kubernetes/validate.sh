#!/bin/sh
# Has a real kube-apiserver judge the manifests (--dry-run=server): make manifests.
# It needs etcd, kube-apiserver, kubectl and openssl, and helm for the chart; nothing listens but on loopback.
set -eu
cd "$(dirname "$0")"
for tool in etcd kube-apiserver kubectl openssl; do
	command -v "$tool" >/dev/null || { echo "manifests: SKIPPED: $tool is not there"; exit 0; }
done
work=$(mktemp -d)
trap 'kill $pids 2>/dev/null; wait; rm -rf "$work"' EXIT
pids=
etcd --data-dir "$work/etcd" --listen-client-urls http://127.0.0.1:22379 --advertise-client-urls http://127.0.0.1:22379 \
	--listen-peer-urls http://127.0.0.1:22380 >"$work/etcd.log" 2>&1 &
pids=$!
openssl genrsa -out "$work/sa.key" 2048 2>/dev/null
openssl rsa -in "$work/sa.key" -pubout -out "$work/sa.pub" 2>/dev/null
echo "validate,admin,1,system:masters" >"$work/tokens"
kube-apiserver --etcd-servers=http://127.0.0.1:22379 --bind-address=127.0.0.1 --secure-port=26443 --cert-dir="$work" \
	--token-auth-file="$work/tokens" --authorization-mode=RBAC --allow-privileged --advertise-address=127.0.0.1 \
	--service-cluster-ip-range=10.96.0.0/16 --disable-admission-plugins=ServiceAccount \
	--service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$work/sa.pub" \
	--service-account-signing-key-file="$work/sa.key" >"$work/apiserver.log" 2>&1 &
pids="$pids $!"
k() { kubectl --server=https://127.0.0.1:26443 --insecure-skip-tls-verify --token=validate --kubeconfig=/dev/null "$@"; }
tries=0
until k get --raw /readyz >/dev/null 2>&1; do
	tries=$((tries + 1))
	[ "$tries" -lt 240 ] || { tail -5 "$work"/*.log; exit 1; }
	sleep .5
done
k create namespace strict >/dev/null
k label namespace strict pod-security.kubernetes.io/enforce=restricted >/dev/null
k create namespace node >/dev/null
k label namespace node pod-security.kubernetes.io/enforce=privileged >/dev/null
# judge wants the manifests in a file to be taken without a warning: judge NAMESPACE FILE
judge() {
	k -n "$1" apply --dry-run=server --validate=strict -f "$2" >"$work/said" 2>&1 || { cat "$work/said"; exit 1; }
	if grep -iE "^(error|warning)|would violate" "$work/said"; then exit 1; fi
}
for file in proxy gateway edge; do
	space=strict
	[ "$file" = edge ] && space=node
	judge "$space" "$file.yaml"
	cat "$work/said"
	command -v helm >/dev/null || continue
	helm template penstock . --set "form=$file" --set image=registry.example/penstock:1 >"$work/chart.yaml"
	judge "$space" "$work/chart.yaml"
	echo "the chart, form $file: $(wc -l <"$work/said") objects"
done
echo "manifests: valid for Kubernetes $(kube-apiserver --version | cut -d' ' -f2); podmonitor.yaml is a custom resource and was not judged"
