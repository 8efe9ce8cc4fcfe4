package bench

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// System is the machine a run was made on.
type System struct {
	Kernel string `json:"kernel"` // release
	Arch   string `json:"arch"`
	CPUs   int    `json:"cpus"`
}

func readSystem() System {
	s := System{Arch: runtime.GOARCH, CPUs: runtime.NumCPU()}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		release, _, _ := bytes.Cut(u.Release[:], []byte{0})
		s.Kernel = string(release)
	}
	return s
}

func (s System) String() string {
	return fmt.Sprintf("Linux %s on %d × %s", s.Kernel, s.CPUs, s.Arch)
}

const availableAlgorithms = "/proc/sys/net/ipv4/tcp_available_congestion_control"

// checkKernelAlgorithms tells which congestion controls the plan needs and this
// kernel lacks.
func checkKernelAlgorithms(senders []Sender) error {
	available, err := os.ReadFile(availableAlgorithms)
	if err != nil {
		return fmt.Errorf("bench: read the kernel's congestion controls: %w", err)
	}
	if missing := missingAlgorithms(senders, string(available)); len(missing) > 0 {
		return fmt.Errorf("bench: this kernel has no congestion control %s, only %s: load it (modprobe tcp_%s), or "+
			"choose another --sender or --envelope",
			strings.Join(missing, ", "), strings.TrimSpace(string(available)), missing[0])
	}
	return nil
}
