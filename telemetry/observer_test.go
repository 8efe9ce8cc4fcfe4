package telemetry

import (
	"encoding/json"
	"fmt"
	"iter"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/telemetry/compare"
)

// observed is an observer of flows that a test makes up, with a clock that the test moves.
type observed struct {
	Observer
	flows   []proxy.FlowInfo
	now     time.Time
	samples []SampledRule
	trial   *proxy.Trial
	stopped []string
}

func newObserved() *observed {
	o := &observed{now: time.Unix(1_800_000_000, 0)}
	o.delivered, o.Downloads = map[uint64]cc.Bytes{}, NewDownloads()
	o.Flows = func() (int, iter.Seq[*proxy.FlowInfo]) {
		return len(o.flows), func(yield func(*proxy.FlowInfo) bool) {
			for i := range o.flows {
				if !yield(&o.flows[i]) {
					return
				}
			}
		}
	}
	o.Samples = func() []SampledRule { return o.samples }
	o.StopSample = func(rule, _ string) error {
		o.stopped, o.samples = append(o.stopped, rule), nil
		return nil
	}
	o.Try = func(t *proxy.Trial) { o.trial = t }
	o.Wall = func() time.Time { return o.now }
	o.Log = slog.New(slog.DiscardHandler)
	return o
}

// addFlow adds a download of a host under a rule.
func (o *observed) addFlow(host, rule, algorithm string) *proxy.FlowInfo {
	o.flows = append(o.flows, proxy.FlowInfo{
		ID: uint64(len(o.flows) + 1), Rule: rule, State: proxy.StateOpen,
		Age:    time.Hour,
		Source: netip.AddrPortFrom(netip.MustParseAddr(host), 4000), Down: proxy.DirectionInfo{Algorithm: algorithm},
		Client: datapath.Info{SRTT: 100 * time.Millisecond, MinRTT: 40 * time.Millisecond},
	})
	return &o.flows[len(o.flows)-1]
}

// passSecond lets each flow write bytes, and a second pass.
func (o *observed) passSecond(bytes cc.Bytes) {
	for i := range o.flows {
		o.flows[i].Client.Delivered += bytes
	}
	o.now = o.now.Add(time.Second)
	o.observeSecond(o.now)
}

func figuresOf(r compare.Result) map[string]compare.Figure {
	out := map[string]compare.Figure{}
	for _, f := range r.Figures {
		out[f.Name] = f
	}
	return out
}

func TestBusySecondsOfSampledRulesAreRecorded(t *testing.T) {
	o := newObserved()
	o.samples = []SampledRule{{Rule: "canary"}}
	for i := range 20 {
		o.addFlow(fmt.Sprintf("10.0.0.%d", i), "canary", "copa").Client.SRTT = 50 * time.Millisecond
		o.addFlow(fmt.Sprintf("10.1.0.%d", i), "", "penstock")
	}
	// This host has flows of both rules, so its seconds show neither.
	o.addFlow("10.2.0.1", "canary", "copa").Client.SRTT = time.Second
	o.addFlow("10.2.0.1", "", "penstock")
	for range 30 {
		o.passSecond(100e3)
	}
	for i := range 20 {
		o.flows[2*i].Idle = time.Second
		o.flows[2*i].Down.Written = 1e3
		o.flows[2*i].Age = 3 * time.Second
		o.ObserveClosed(&o.flows[2*i])
	}
	r, err := o.Compare("canary", "")
	require.NoError(t, err)
	assert.Equal(t, 20, r.First.Hosts)
	assert.Equal(t, 20, r.Second.Hosts)
	assert.InDelta(t, 20*29, r.First.Seconds, 0, "the first look has nothing to compare with")
	f := figuresOf(r)
	assert.InDelta(t, 0.010, f["queueing delay, mean"].First, 1e-9)
	assert.InDelta(t, 0.060, f["queueing delay, mean"].Second, 1e-9)
	assert.InDelta(t, 8e5, f["rate while busy"].First, 1)
	assert.Contains(t, r.Verdict, "84 % less queueing delay at the 95th percentile")
	assert.Empty(t, o.stopped)

	_, err = o.Compare("other", "")
	assert.ErrorContains(t, err, `rule "other" is not recorded; recorded are the rules with match.sample, and those that `+
		"the other hosts have: canary, defaults")
	o.samples = nil
	_, err = o.Compare("canary", "")
	assert.ErrorContains(t, err, "no rule has a match.sample")
}

func TestASampleThatCostsMuchIsStopped(t *testing.T) {
	o := newObserved()
	o.samples = []SampledRule{{Rule: "canary"}}
	for i := range 20 {
		o.addFlow(fmt.Sprintf("10.0.0.%d", i), "canary", "fixed")
		o.addFlow(fmt.Sprintf("10.1.0.%d", i), "", "penstock")
	}
	for range 30 {
		for i := range o.flows {
			o.flows[i].Client.Delivered += cc.Bytes(50e3 * (1 + i%2)) // the sample has half of the rate
		}
		o.now = o.now.Add(time.Second)
		o.observeSecond(o.now)
	}
	o.checkSamples(o.now)
	assert.Equal(t, []string{"canary"}, o.stopped)
	require.Len(t, o.Gains(), 1)
	assert.Contains(t, o.Gains()[0].Text, "canary against defaults: no difference in queueing delay")
}

func TestWithoutSamplesAndProofsNothingIsObserved(t *testing.T) {
	o := newObserved()
	o.addFlow("10.0.0.1", "", "penstock")
	o.Flows = func() (int, iter.Seq[*proxy.FlowInfo]) { t.Error("flows were read"); return 0, nil }
	o.passSecond(1e6)
	o.ObserveClosed(&o.flows[0])
	assert.Empty(t, o.hosts)
}

// runProof has a host download under one connection a turn, which begins as the trial says.
func runProof(t *testing.T, o *observed, last time.Duration) Proof {
	t.Helper()
	require.NoError(t, o.StartProof("10.0.0.1", last))
	require.NotNil(t, o.trial)
	assert.Equal(t, "10.0.0.1", o.trial.Host)
	turn := last / turnsOfProof
	for end := o.now.Add(last); o.now.Before(end); {
		algorithm, srtt := "penstock", 50*time.Millisecond
		if o.trial != nil && o.trial.Unmanaged() {
			algorithm, srtt = "none", 400*time.Millisecond
		}
		o.flows = nil
		o.delivered = map[uint64]cc.Bytes{1: 0}
		o.addFlow("10.0.0.1", "", algorithm).Client.SRTT = srtt
		for range int(turn / time.Second) {
			o.passSecond(1e6)
		}
	}
	o.passSecond(1e6)
	p, ok := o.LastProof()
	require.True(t, ok)
	return p
}

func TestAProofSaysWhatAHostGains(t *testing.T) {
	o := newObserved()
	p := runProof(t, o, 2*time.Minute)
	assert.True(t, p.Ended)
	assert.Nil(t, o.trial, "new connections are managed again")
	assert.InDelta(t, turnsOfProof/2, p.Result.First.Hosts, 1)
	assert.InDelta(t, turnsOfProof/2, p.Result.Second.Hosts, 1)
	assert.Contains(t, p.Result.Verdict, "97 % less queueing delay at the 95th percentile")
	assert.Contains(t, p.Result.Verdict, "no difference in rate while busy is shown")
}

func TestAConnectionOfTheOtherSideDoesNotCount(t *testing.T) {
	o := newObserved()
	require.NoError(t, o.StartProof("10.0.0.1", time.Minute))
	o.addFlow("10.0.0.1", "", "penstock") // begun before, and there all the time
	o.addFlow("10.0.0.9", "", "none")     // of another host
	for range 59 {
		o.passSecond(1e6)
	}
	p, _ := o.LastProof()
	assert.False(t, p.Ended)
	assert.InDelta(t, 29, p.Result.First.Seconds, 3, "its own turns")
	assert.Zero(t, p.Result.Second.Seconds)
	assert.Contains(t, p.Result.Verdict, "not enough yet: ")
}

func TestTheTurnsOfAProofAreEvenAndInNoOrder(t *testing.T) {
	orders := map[bool]int{}
	for seed := range uint64(100) {
		p := proof{seed: seed}
		for pair := range turnsOfProof / 2 {
			require.NotEqual(t, p.isUnmanaged(2*pair), p.isUnmanaged(2*pair+1))
			orders[p.isUnmanaged(2*pair)]++
		}
	}
	assert.InDelta(t, 600, orders[true], 60)
}

func TestPagesOfComparisons(t *testing.T) {
	o := newObserved()
	o.samples = []SampledRule{{Rule: "canary"}}
	local := true
	mux := http.NewServeMux()
	o.registerPages(mux, func(*http.Request) bool { return local })
	ask := func(method, page string, header ...string) (int, string) {
		r := httptest.NewRequest(method, page, nil)
		r.Host = "localhost"
		for i := 0; i+1 < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
	code, body := ask("GET", "/v1/compare?first=canary&second=defaults")
	assert.Equal(t, 200, code)
	assert.JSONEq(t, `{"first": {"rule": "canary", "hosts": 0, "busy_seconds": 0},
		"second": {"rule": "", "hosts": 0, "busy_seconds": 0},
		"unit": "hosts", "figures": [], "harmful": false,
		"verdict": "not enough yet: 0 and 0 hosts were seen, and 8 are needed on each side"}`, body)
	code, body = ask("GET", "/v1/compare?first=nothing")
	assert.Equal(t, 404, code)
	assert.Contains(t, body, "not recorded")
	code, body = ask("GET", "/v1/proof")
	assert.Equal(t, 404, code)
	assert.Contains(t, body, "penstock prove begins one")

	for _, c := range []struct {
		query string
		local bool
		head  []string
		code  int
		words string
	}{
		{"host=10.0.0.1&for=2m", false, nil, 403, "from this machine only"},
		{"host=10.0.0.1&for=2m", true, []string{"Origin", "https://evil.example"}, 403, "from this machine only"},
		{"for=2m", true, nil, 400, "a proof needs host"},
		{"host=10.0.0.1&for=soon", true, nil, 400, `and for, a time such as 2m; not "10.0.0.1" and "soon"`},
		{"host=10.0.0.1&for=1s", true, nil, 409, "a proof lasts from 30s to 1h0m0s, not 1s"},
		{"host=" + url.QueryEscape("2001:db8::7") + "&for=2m", true, nil, 200, `"host":"2001:db8::/64"`},
		{"host=10.0.0.1&for=2m", true, nil, 409, "a proof runs already"},
	} {
		local = c.local
		code, body := ask("POST", "/v1/proof?"+c.query, c.head...)
		assert.Equal(t, c.code, code, c.query)
		assert.Contains(t, body, c.words, c.query)
	}
	code, body = ask("DELETE", "/v1/proof")
	assert.Equal(t, 200, code)
	var p Proof
	require.NoError(t, json.Unmarshal([]byte(body), &p))
	assert.True(t, p.Ended)
	assert.Nil(t, o.trial)
	o.StopProof() // does nothing
}
