package recipe

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRunsThatTablesWouldMixAreRefused(t *testing.T) {
	const fine = "link: {rate: $(mbit)mbit, rtt: 40ms}\nalgorithm: $(by)\nflows: {a: {}}\nduration: 2s\n"
	const two = `two runs are called "my" and go the same way`
	const must = "must: [1 > 0]"
	plain := strings.NewReplacer("$(by)", "copa", "$(mbit)", "12").Replace(fine)
	for text, says := range map[string]string{
		"vary: {by: [copa, cubic], mbit: [12]}\n" + fine:    "my:1:1: vary: " + two,
		"vary: {by: [copa], mbit: [12, 12.0]}\n" + fine:     two,
		"vary: {by: [copa], mbit: [100.1, 100.4]}\n" + fine: "",

		"vary: {by: [copa, cubic], mbit: [12]}\nname: $(by)\n" + fine: "",

		"runs: [{name: a}, {name: a, algorithm: cubic}]\n" + plain: "my:1:1: runs: two runs",

		"runs: [{name: a}, {name: a, link: {rate: 6mbit}}]\n" + plain + must: "my:1:1: runs: two runs are",

		"vary: {by: [copa], mbit: [6, 12]}\n" + fine + must: `my:1:1: vary: two runs are called "my"`,

		"vary: {by: [copa], mbit: [12]}\nname: a\n" + fine +
			"short: {vary: {mbit: [6, 12.0, 12]}}\n": "my:1:1: vary: two runs",

		"vary: [" + strings.Repeat("{}, ", 1001) + "]\n" + plain: "my:1:1: vary: these are more than the 1000",

		"runs: [{name: a}]\n" + plain + "vary: [" + strings.Repeat("{}, ", 1001) + "]": "my:1:1: runs: these",
	} {
		_, err := readText("my", "my", []byte(text), loader{})
		if says == "" {
			assert.NoError(t, err, text)
			continue
		}
		assert.ErrorContains(t, err, says, text)
	}
}

func TestWhatWouldBePassedOverIsRefused(t *testing.T) {
	const fine = "link: {rate: 12mbit, rtt: 40ms}\nalgorithm: copa\nflows: {a: {}}\nduration: 2s\n"
	flow := func(keys string) string { return strings.Replace(fine, "{}", "{"+keys+"}", 1) }
	link := func(keys string) string { return strings.Replace(fine, "rate: 12mbit, rtt: 40ms", keys, 1) }
	for text, says := range map[string]string{
		flow("control: bbr"):                      "my:3:13: flows.a.control: it is for app: upload or quic, and this",
		flow("every: 1s"):                         "my:3:13: flows.a.every: it is for app: requests or web",
		flow("chunk: 1s"):                         "flows.a.chunk: it is for app: video",
		flow("buffer: 1s"):                        "flows.a.buffer: it is for app: video",
		flow("app: web, size: 1KB, rate: 1mbit"):  "flows.a.rate: it is for app: bulk, video or udp, and",
		flow("app: udp, rate: 1mbit, size: 1KB"):  "flows.a.size: it is for app: bulk, requests or web",
		flow("app: udp, rate: 1mbit, weight: 2"):  "my:3:36: flows.a.weight: nothing decides about udp",
		flow("app: upload, algorithm: cubic"):     "flows.a.algorithm: nothing decides about upload",
		flow("direct: true, weight: 2"):           "flows.a.weight: nothing decides about a flow that goes past",
		flow("app: upload, receive: none"):        "flows.a.receive: it is the edge's: write edge: {defaults: ",
		flow("stagger: 1s"):                       "flows.a.stagger: it is for several flows: give it count",
		flow("hosts: 2"):                          "flows.a.hosts: it is for several flows: give it count",
		link("rate: 12mbit, payload: 10mbit"):     "my:1:8: link.rate: beside it there is payload",
		link("carries: 12mbit, trace: lte"):       "link.carries: beside it there is trace",
		link("rate: 12mbit, trace: lte"):          "link.rate: beside it there is trace",
		link("rate: 1mbit, rtt: 4ms, delay: 3ms"): "my:1:21: link.rtt: beside it there is delay",
		fine + "cell: {hosts: [{bits: 500}]}":     "my:1:1: link: beside it there is cell",
		fine + "cell: {blocks: 50}":               "my:5:1: cell: it has no hosts: write such as hosts: [{queue",

		flow("app: upload, ecn: off"):           "flows.a.ecn: it is for app: bulk, requests, web or",
		flow("app: udp, rate: 3mbit, ecn: l4s"): "flows.a.ecn: it is for app: bulk, requests, web or",
		flow("size: 1MB, sizes: caida"):         "my:3:13: flows.a.size: beside it there is sizes",
		link("rate: 12mbit, steps: [{at: 1s}]"): "link.steps: the one at 1s has no rate: write {at: 1s,",

		fine + "agents: [{name: a, program: reno, command: b}]": "agents: a has a program and a command",

		fine + "about: [a]": "my:5:8: about: expected one line",
		fine + "source: {}": "my:5:9: source: expected one line",
		fine + "changes: [{at: 1s, rtt: 9ms, refused: true}]": "changes[0].refused: nobody refuses an rtt",

		fine + "runs: [{name: a, must: [1 > 2]}]":       "my:5:18: runs.must: it is of the whole experiment: write it",
		fine + "runs: [{name: a, short: {warmup: 1s}}]": "runs.short: it is of the whole experiment",
		fine + "runs: [{name: a, runs: []}]":            "runs.runs: it is of the whole experiment",
		fine + "runs: [{name: a, about: b}]":            "runs.about: it is of the whole experiment",
		fine + "runs: [{name: a, source: b}]":           "runs.source: it is of the whole experiment",
		fine + "short: {must: [1 > 2]}":                 "my:5:9: short.must: it is of the whole experiment: write it",
		fine + "short: {about: b}":                      "short.about: it is of the whole experiment",
		fine + "short: {source: b}":                     "short.source: it is of the whole experiment",
		fine + "short: {short: {}}":                     "short.short: it is of the whole experiment",
		fine + "control: {control: {}}":                 "control.control: it is of the whole experiment",

		fine + "must: ['rpm(\"b\") > 0']":      `my:5:8: must[0].is: there is no flow "b"`,
		fine + "must: ['requests(\"b\") > 0']": `must[0].is: there is no flow "b"`,
		fine + "must: ['pages(\"b\") > 0']":    `must[0].is: there is no flow "b"`,
	} {
		_, err := readText("my", "my", []byte(text), loader{})
		assert.ErrorContains(t, err, says, text)
	}
	r, err := readText("my", "my", []byte(flow("app: web, size: 1KB, every: 1s, count: 2, stagger: 1s, weight: 2")+
		"must: ['rpm(\"a\") > 0', 'len(pages(\"a \")) > 0', 'len(requests(\"a 2\")) > 0']"), loader{})
	require.NoError(t, err)
	_, err = r.Play(context.Background(), Full, 1, Virtual, func(Progress) {})
	require.NoError(t, err)
}
