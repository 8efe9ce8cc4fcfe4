//go:build linux

// Package kubernetes boots Kubernetes on this machine and runs the manifests of
// deploy/kubernetes in it: make kubernetes-test. Each node is a network namespace with a
// container runtime, a kubelet and a kube-proxy of its own, as the programs are:
//
//	            outside                server at 198.51.100.1, clients
//	           /   |   \
//	10.99.1.1 /    |    \ 10.99.2.1    10.99.9.2
//	     node1   node2   phone         a WireGuard client
//	     the control plane is on node1; pods are in 10.244.N.0/24, services in 10.96.0.0/16
package kubernetes

import (
	"fmt"
	"os"
	"testing"

	"github.com/penstock-net/penstock/internal/need"
)

// place is of the environment: the directory that run.sh has made, with the programs in bin.
var place = os.Getenv("PENSTOCK_KUBERNETES")

func TestMain(m *testing.M) {
	if place == "" {
		fmt.Println("SKIPPED: the tests here take a cluster: make kubernetes-test")
		return
	}
	os.Exit(need.Run(m))
}
