package telemetry_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/telemetry"
)

// A base station posts what its link to a phone can take.
func ExampleHintReceiver() {
	hints := &telemetry.HintReceiver{
		Pass: func(about netip.Prefix, h cc.Hint) (groups int) {
			fmt.Println(about, h.Capacity)
			return 1 // flows to the phone share one window
		},
		Clock: func() cc.Time { return cc.Time(time.Second) },
	}
	server := httptest.NewServer(telemetry.Pages{Hints: hints}.Handler(true))
	defer server.Close()

	answer, err := http.Post(server.URL+"/v1/hints", "application/json",
		strings.NewReader(`{"host": "192.0.2.7", "capacity_bits_per_second": 20e6}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	fmt.Print(string(body))
	// Output:
	// 192.0.2.7/32 20mbit
	// {"groups":1}
}

// A trace has a line for each event, which jq and pandas read.
func ExampleTrace() {
	trace := telemetry.NewTrace(os.Stdout)
	trace.Event(flow.Event{
		Kind: "ack", Flow: 7, Group: "down|lan|192.0.2.7", Algorithm: "reno", Bytes: 1448, RTT: 42 * time.Millisecond,
		Control: cc.Control{Cwnd: 14480, Phase: "slow start"},
	})
	if err := trace.Close(); err != nil {
		fmt.Println(err)
	}
	// Output:
	// {"t_seconds":0,"event":"ack","flow":7,"group":"down|lan|192.0.2.7","algorithm":"reno","bytes":1448,"inflight_bytes":0,"delivered_bytes":0,"cwnd_bytes":14480,"pacing_bits_per_second":0,"rtt_seconds":0.042,"reverse_queue_seconds":0,"srtt_seconds":0,"min_rtt_seconds":0,"internals":{"ssthresh_packets":0},"cwnd_limited":false,"one_way":false,"phase":"slow start"}
}
