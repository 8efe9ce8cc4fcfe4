package proxy

import (
	"encoding/json"
	"net/netip"
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/policy"
)

// sampleRecord has all fields set.
func sampleRecord() connectionRecord {
	client, server := netip.MustParseAddrPort("[fe80::1%2]:4000"), netip.MustParseAddrPort("192.0.2.1:443")
	terms := flow.Terms{
		Group: "web|fe80::1|down", Host: client.Addr(), Ends: &cc.Ends{From: server, To: client}, Algorithm: "copa",
		Params: cc.Params{"delta": 0.25}, MaxRate: 8e6, ConnectionRate: 4e6, Priority: 2, Weight: 3, Target: 2e6,
		MinRate: 1e6, HintCap: 0.9, Class: flow.Guarantee, Receives: true, Restarts: true, Alone: true,
	}
	d := directionRecord{
		Read: 1003, Written: 1000, Spliced: 600, Retransmitted: 40, Stored: []byte{0, 1, 255}, Managed: true, Underway: 5,
		Window: flow.Dormant{Cwnd: 30_000, BaseRTT: 20 * time.Millisecond, Rate: 12e6, MSS: 1448},
	}
	over := d
	over.Read, over.Stored, over.Finished = 1000, nil, true
	leg := kernel.DetachedLeg{Remote: client, Dialled: true, WriteClosed: true, Control: "cubic"}
	return connectionRecord{
		Listener: "web", Source: client, Target: server, Host: "example.org:443", Fixed: true,
		Facts: policy.Facts{
			Listener: "web", Protocol: policy.TCP, Source: client, Peer: "proxy", Inside: true, Target: server, TargetPeer: "p",
			TargetListener: "vpn", Host: "example.org", ServerName: "example.org",
		},
		Verdict: policy.Verdict{
			Rule: "video", Refuse: "no", Down: terms, Up: terms, FromServer: terms, FromClient: terms,
			SendProxy: 2, KeepDSCP: true,
		},
		Age: time.Minute, Setup: time.Second, Idle: time.Millisecond, Client: leg, Server: leg, Down: d, Up: over,
	}
}

// TestRecordsOfEveryVersionAreRead reads what the first version wrote. Its file is never changed: a process of that
// version hands its connections to later ones.
func TestRecordsOfEveryVersionAreRead(t *testing.T) {
	want := sampleRecord()
	for i := range reflect.TypeOf(want).NumField() {
		assert.False(t, reflect.ValueOf(want).Field(i).IsZero(), reflect.TypeOf(want).Field(i).Name)
	}
	text, err := os.ReadFile("testdata/record.v1.json")
	require.NoError(t, err)
	got, err := decodeBatch(text, []int{7, 8})
	require.NoError(t, err)
	want.Client.FD, want.Server.FD = 7, 8
	assert.Equal(t, []connectionRecord{want}, got)
}

// TestRecordsThatCannotBe have a process refuse what no process of its version has written.
func TestRecordsThatCannotBe(t *testing.T) {
	for name, change := range map[string]func(b *batchRecord){
		"a later version":      func(b *batchRecord) { b.Version++ },
		"no version":           func(b *batchRecord) { b.Version = 0 },
		"no descriptors":       func(b *batchRecord) { b.Connections = append(b.Connections, b.Connections[0]) },
		"no connection":        func(b *batchRecord) { b.Connections = nil },
		"no address":           func(b *batchRecord) { b.Connections[0].Client.Remote = netip.AddrPort{} },
		"a time to come":       func(b *batchRecord) { b.Connections[0].Age = -1 },
		"bytes out of nowhere": func(b *batchRecord) { b.Connections[0].Down.Stored = []byte("four") },
		"bytes behind the end": func(b *batchRecord) {
			b.Connections[0].Up.Read, b.Connections[0].Up.Stored = 1001, []byte("x")
		},
		"a window below zero":   func(b *batchRecord) { b.Connections[0].Down.Window.Cwnd = -1 },
		"both directions' ends": func(b *batchRecord) { b.Connections[0].Down = b.Connections[0].Up },
	} {
		b := batchRecord{recordVersion, []connectionRecord{sampleRecord()}}
		text, err := json.Marshal(b)
		require.NoError(t, err)
		_, err = decodeBatch(text, []int{7, 8})
		require.NoError(t, err)
		change(&b)
		text, err = json.Marshal(b)
		require.NoError(t, err)
		_, err = decodeBatch(text, []int{7, 8})
		assert.Error(t, err, name)
	}
}

// FuzzDecodeBatch reads what another process may write.
func FuzzDecodeBatch(f *testing.F) {
	text, err := encodeBatch([]connectionRecord{sampleRecord()})
	require.NoError(f, err)
	f.Add(text, uint8(2))
	f.Add([]byte(`{"version":1,"connections":[],"later":{}}`), uint8(0))
	f.Fuzz(func(t *testing.T, text []byte, n uint8) {
		records, err := decodeBatch(text, make([]int, n))
		if err != nil {
			return
		}
		assert.Len(t, records, int(n)/2)
		again, err := encodeBatch(records)
		require.NoError(t, err)
		_, err = decodeBatch(again, make([]int, n))
		assert.NoError(t, err)
	})
}
