package bench

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseSenders(t *testing.T) {
	for name, c := range map[string]struct {
		specs, envelopes []string
		want             []Sender
	}{
		"a bare kernel name sends directly": {
			[]string{"cubic", "bbr", "reno"},
			nil,
			[]Sender{{Name: "cubic", Kernel: "cubic"}, {Name: "bbr", Kernel: "bbr"}, {Name: "reno", Kernel: "reno"}},
		},
		"a kernel name over an envelope is Penstock's": {
			[]string{"cubic@bbr"},
			nil,
			[]Sender{{Name: "cubic@bbr", Algorithm: "cubic", Envelope: "bbr"}},
		},
		"an algorithm leaves the envelope to the proxy": {
			[]string{"copa", "static:cwnd_packets=22"},
			nil,
			[]Sender{
				{Name: "copa", Algorithm: "copa"},
				{Name: "static:cwnd_packets=22", Algorithm: "static:cwnd_packets=22"},
			},
		},
		"several envelopes are several senders, and the kernel's own stay one": {
			[]string{"cubic", "copa:delta=0.1"},
			[]string{"bbr", "cubic"},
			[]Sender{
				{Name: "cubic", Kernel: "cubic"},
				{Name: "copa:delta=0.1@bbr", Algorithm: "copa:delta=0.1", Envelope: "bbr"},
				{Name: "copa:delta=0.1@cubic", Algorithm: "copa:delta=0.1", Envelope: "cubic"},
			},
		},
		"an envelope of its own goes before the flag": {
			[]string{"copa@reno"},
			[]string{"bbr"},
			[]Sender{{Name: "copa@reno", Algorithm: "copa", Envelope: "reno"}},
		},
		"our own control in the kernel is an envelope": {
			[]string{"copa@ebpf", "static:cwnd_packets=23"},
			[]string{"ebpf", "reno"},
			[]Sender{
				{Name: "copa@ebpf", Algorithm: "copa", Envelope: "ebpf"},
				{Name: "static:cwnd_packets=23@ebpf", Algorithm: "static:cwnd_packets=23", Envelope: "ebpf"},
				{Name: "static:cwnd_packets=23@reno", Algorithm: "static:cwnd_packets=23", Envelope: "reno"},
			},
		},
		"virtual time is in the place of an envelope": {
			[]string{"copa", "cubic@sim", "vegas"},
			[]string{"ebpf", "sim"},
			[]Sender{
				{Name: "copa@ebpf", Algorithm: "copa", Envelope: "ebpf"},
				{Name: "copa@sim", Algorithm: "copa", Envelope: "sim"},
				{Name: "cubic@sim", Algorithm: "cubic", Envelope: "sim"},
				{Name: "vegas@ebpf", Algorithm: "vegas", Envelope: "ebpf"},
				{Name: "vegas@sim", Algorithm: "vegas", Envelope: "sim"},
			},
		},
		"the same twice is once": {
			[]string{"cubic", "cubic", "none@bbr", "none"},
			[]string{"bbr"},
			[]Sender{{Name: "cubic", Kernel: "cubic"}, {Name: "none@bbr", Algorithm: "none", Envelope: "bbr"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseSenders(c.specs, c.envelopes)
			require.NoError(t, err)
			assert.Equal(t, c.want, got)
		})
	}
}

func TestParseSendersNamesTheMistake(t *testing.T) {
	for name, c := range map[string]struct {
		specs, envelopes []string
		says             []string
	}{
		"nobody":               {nil, nil, []string{"--sender", "at least one"}},
		"an unknown algorithm": {[]string{"kopa"}, nil, []string{`--sender "kopa"`, "copa"}},
		"an unknown setting":   {[]string{"copa:dalte=1"}, nil, []string{"--sender", "dalte", "delta"}},
		"an unknown envelope": {
			[]string{"copa@vegas"},
			nil,
			[]string{`--sender "copa@vegas"`, "cubic, bbr, reno, ebpf"},
		},
		"none in virtual time": {
			[]string{"none@sim"},
			nil,
			[]string{`--sender "none@sim"`, "leaves the window to the kernel"},
		},
		"none in virtual time as well": {
			[]string{"none"},
			[]string{"bbr", "sim"},
			[]string{`--sender "none"`, "leaves the window to the kernel"},
		},
		"virtual time by itself":       {[]string{"sim"}, nil, []string{`--sender "sim"`}},
		"ours sends nothing by itself": {[]string{"ebpf"}, nil, []string{`--sender "ebpf"`}},
		"an unknown envelope flag":     {[]string{"copa"}, []string{"hybla"}, []string{"--envelope", `"hybla"`}},
		"an empty name":                {[]string{""}, nil, []string{`--sender ""`}},
		"nothing before an envelope":   {[]string{"@bbr"}, nil, []string{`--sender "@bbr"`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseSenders(c.specs, c.envelopes)
			require.Error(t, err)
			for _, s := range c.says {
				assert.ErrorContains(t, err, s)
			}
		})
	}
}
