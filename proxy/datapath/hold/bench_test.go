package hold

import (
	"encoding/binary"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// BenchmarkManyClients has all clients known that a Holder keeps, each with a window of its own and six flows, and a
// tenth of them active, with ten packets a second each.
//
// CPU-ns/op is a round of checkEvery with its packets; longest-ms the longest one; B/client the memory of a client, and
// B/flow that of a flow.
func BenchmarkManyClients(b *testing.B) {
	const flows, active = 6, maxClients / 10
	r := newRoad(b)
	r.decide = func(f FlowKey) Decision {
		group := f.Target.Addr().String()
		return Decision{Manage: true, Acknowledged: true, Terms: flow.Terms{Group: group, Algorithm: cc.Default}}
	}
	packet := make([]byte, 28)
	packet[0], packet[9] = 0x45, protocolUDP
	arrive := func(client, port int) {
		binary.BigEndian.PutUint32(packet[16:], 0x0a000000|uint32(client))
		binary.BigEndian.PutUint16(packet[20:], uint16(port))
		r.arriveAs(packet, segment)
	}
	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	settle := func() { // what the road has noted is no part of a Holder
		r.accepted, r.requests = nil, nil
	}
	empty := heap()
	for client := range maxClients {
		arrive(client, 0)
	}
	r.runDueWork(r.now)
	r.answer(20 * time.Millisecond)
	settle()
	known := heap()
	for client := range maxClients {
		for port := 1; port < flows; port++ {
			arrive(client, port)
		}
	}
	settle()
	all := heap()
	require.Equal(b, maxClients, len(r.clients))
	require.Equal(b, maxClients*flows, len(r.flows))
	r.wait(activeTime + time.Second)

	const perRound = active * 10 / int(time.Second/checkEvery)
	next := 0
	round := func() {
		r.now = r.now.Add(checkEvery)
		for range perRound {
			arrive(next%active, 0)
			next++
		}
		r.runDueWork(r.now)
		for _, e := range r.requests {
			r.ReceiveEcho(r.now, e.to, e.id, e.sequence)
		}
		settle()
	}
	for range 200 {
		round()
	}
	require.Len(b, r.active, active)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	threadTime := func() time.Duration { // without what other programs take
		var ts unix.Timespec
		require.NoError(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
		return time.Duration(ts.Nano())
	}
	longest, began := time.Duration(0), threadTime()
	for b.Loop() {
		at := threadTime()
		round()
		longest = max(longest, threadTime()-at)
	}
	b.ReportMetric(float64((threadTime()-began).Nanoseconds())/float64(b.N), "CPU-ns/op")
	b.ReportMetric(longest.Seconds()*1e3, "longest-ms")
	b.ReportMetric((known-empty)/maxClients, "B/client")
	b.ReportMetric((all-known)/(maxClients*(flows-1)), "B/flow")
}
