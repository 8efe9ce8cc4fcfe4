//go:build linux

package cost

import (
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkStalledReader has one client that stops reading while the server goes on
// sending, and nothing else connected.
func BenchmarkStalledReader(b *testing.B) {
	const wall = 20 * time.Second
	executable := build(b)
	var rows []row
	for _, c := range []carrier{unmanaged, managed("ebpf"), managed("bbr")} {
		rows = append(rows, row{name: c.name, connections: 1, run: func(b *testing.B) figures {
			s := newSite(b, executable, c)
			defer s.close(b)
			reader := s.open(b, hosts(0, 1), 1, askStream)[0]
			_, err := io.CopyN(io.Discard, reader, 10<<20)
			require.NoError(b, err)
			time.Sleep(warmUp)
			before := s.account(b)
			time.Sleep(wall)
			return s.account(b).since(before)
		}})
	}
	tabulate(b, rows)
}

// BenchmarkIdle keeps connections that had one exchange, and then nothing. Kernel
// memory is that of the whole machine, so the first row is for what the clients and
// the server use of it by themselves.
func BenchmarkIdle(b *testing.B) {
	connections := enough(10000)
	executable := build(b)
	var direct float64 // bytes of kernel memory for a connection without a proxy
	idle := func(c carrier) row {
		return row{name: c.name, connections: connections, run: func(b *testing.B) figures {
			s := newSite(b, executable, c)
			defer s.close(b)
			kernel := procField(b, "/proc/meminfo", "Slab")
			var resident, open int64
			if s.edge != nil {
				resident, open = s.edge.memory(b), s.edge.descriptors(b)
			}
			s.open(b, hosts(0, crowdHosts), connections, askEcho)
			time.Sleep(warmUp)
			slab := float64(procField(b, "/proc/meminfo", "Slab")-kernel) / float64(connections)
			if s.edge == nil {
				direct = slab
				return figures{"connections": float64(connections), "slab-KiB": slab}
			}
			before := s.account(b)
			time.Sleep(measure)
			after := s.account(b)
			return figures{
				"connections": float64(connections),
				"switches":    float64(after.switches - before.switches),
				"CPU-ms":      float64((after.cpu - before.cpu).Microseconds()) / 1e3,
				"RSS-KiB":     float64(s.edge.memory(b)-resident) / float64(connections), "slab-KiB": slab - direct,
				"descriptors": float64(s.edge.descriptors(b)-open) / float64(connections),
			}
		}}
	}
	tabulate(b, []row{idle(carrier{name: "direct"}), idle(unmanaged), idle(managed("ebpf")), idle(managed("bbr"))})
}

// memory is what the program has resident, in KiB.
func (p *program) memory(b *testing.B) (n int64) {
	for _, pid := range processes(b, p.pid()) {
		n += procField(b, fmt.Sprintf("/proc/%d/status", pid), "VmRSS")
	}
	return n
}

// descriptors counts those that the program has open.
func (p *program) descriptors(b *testing.B) (n int64) {
	for _, pid := range processes(b, p.pid()) {
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		require.NoError(b, err)
		n += int64(len(open))
	}
	return n
}
