package userspace

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// everybody is an outside whose every address is one peer's.
type everybody struct{}

func (everybody) Peer(netip.Addr) string        { return "phone" }
func (everybody) Addr() net.Addr                { return nil }
func (everybody) Place(netip.Addr) tunnel.Place { return tunnel.Elsewhere }
func (everybody) Gateway(netip.Addr) netip.Addr { return netip.Addr{} }
func (everybody) Own(netip.Addr) netip.Addr     { return netip.Addr{} }
func (everybody) Health() error                 { return nil }
func (everybody) Drain()                        {}
func (everybody) Close() error                  { return nil }

const benchPayload = 1200

// bench is the forwarder and its stack without a tunnel around them.
func bench(b *testing.B) (*netstack.Stack, *Datagrams) {
	needNamespace(b)
	start := time.Now() //nolint:forbidigo // the stack under test runs on it
	clock := func() cc.Time { return cc.Time(time.Since(start)) + 1 }
	stack, err := netstack.New(netstack.Config{MTU: mtu, Clock: clock})
	require.NoError(b, err)
	terms := flow.Terms{Group: "phone", Algorithm: "reno"}
	d := forwardDatagrams("vpn", stack, everybody{}, usual(), tunnel.Forwarding{
		Flows: &flow.Manager{}, Clock: clock,
		Verdict: func(tunnel.Sent) (down, up flow.Terms, err error) { return terms, up, nil },
	})
	b.Cleanup(func() {
		require.NoError(b, d.Close())
		require.NoError(b, stack.Close())
	})
	return stack, d
}

// udp4 is an IPv4 packet with a datagram that has no checksum.
func udp4(from, to netip.AddrPort, payload int) []byte {
	p := make([]byte, 28+payload)
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
	copy(p[12:], from.Addr().AsSlice())
	copy(p[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(p[10:], ^checksum.Checksum(p[:20], 0))
	binary.BigEndian.PutUint16(p[20:], from.Port())
	binary.BigEndian.PutUint16(p[22:], to.Port())
	binary.BigEndian.PutUint16(p[24:], uint16(8+payload))
	return p
}

// report adds what the processor spent, in seconds per gigabyte, on all of the
// process: the other end as well.
func report(b *testing.B, run func()) {
	before := need.CPU(b)
	b.SetBytes(benchPayload)
	b.ResetTimer()
	run()
	b.StopTimer()
	b.ReportMetric((need.CPU(b)-before).Seconds()/(float64(b.N)*benchPayload/1e9), "cpu-s/GB")
	b.ReportMetric(float64(b.N)*benchPayload*8/1e6/b.Elapsed().Seconds(), "Mbit/s")
}

func BenchmarkDatagramsFromOutside(b *testing.B) {
	for name, batch := range map[string]int{"one by one": 1, "32 at once": 32} {
		b.Run(name, func(b *testing.B) {
			stack, _ := bench(b)
			out, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(outside4, 0)))
			require.NoError(b, err)
			b.Cleanup(func() { _ = out.Close() })
			stack.Deliver(udp4(netip.AddrPortFrom(inner, 5000), out.LocalAddr().(*net.UDPAddr).AddrPort(), 1))
			_, to, err := out.ReadFromUDPAddrPort(make([]byte, 10))
			require.NoError(b, err)
			raw, err := out.SyscallConn()
			require.NoError(b, err)
			require.NoError(b, raw.Control(func(fd uintptr) {
				if batch > 1 {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, benchPayload)
				}
			}))
			require.NoError(b, err)
			bufs, sizes := makeBuffers(64, 1<<11)
			data := make([]byte, batch*benchPayload)
			report(b, func() {
				for sent, got := 0, 0; got < b.N; {
					for ; sent < min(b.N, got+64); sent += batch {
						_, err := out.WriteToUDPAddrPort(data, to)
						require.NoError(b, err)
					}
					n, err := stack.Collect(context.Background(), bufs, sizes, 0)
					require.NoError(b, err)
					got += n
				}
			})
		})
	}
}

func BenchmarkDatagramsFromAPeer(b *testing.B) {
	stack, d := bench(b)
	out, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(outside4, 0)))
	require.NoError(b, err)
	b.Cleanup(func() { _ = out.Close() })
	p := udp4(netip.AddrPortFrom(inner, 5000), out.LocalAddr().(*net.UDPAddr).AddrPort(), benchPayload)
	data := make([]byte, benchPayload)
	report(b, func() {
		for range b.N {
			stack.Deliver(p)
			_, _, err := out.ReadFromUDPAddrPort(data)
			require.NoError(b, err)
		}
	})
	require.Zero(b, d.Stats().Failed)
}
