package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestNamesAreSeparatedByCommas(t *testing.T) {
	for text, want := range map[string][]string{
		"copa":                        {"copa"},
		"copa,bbr":                    {"copa", "bbr"},
		"copa:delta=0.1,mode=auto":    {"copa:delta=0.1,mode=auto"},
		"copa:delta=0.1@ebpf,cubic":   {"copa:delta=0.1@ebpf", "cubic"},
		"copa:a=1,b=2,static:c=3,bbr": {"copa:a=1,b=2", "static:c=3", "bbr"},
		"a=1,copa":                    {"a=1", "copa"},
		"copa,":                       {"copa", ""},
		"copa:delta=0.25,alcc,bbr":    {"copa:delta=0.25,alcc", "bbr"},
		"copa,bbr,copa":               {"copa", "bbr"},
	} {
		list := []string{"penstock"}
		require.NoError(t, (&names{list: &list}).Set(text))
		assert.Equal(t, want, list, text)
	}
	list := []string{"penstock"}
	n := names{list: &list}
	assert.Equal(t, "penstock", n.String(), "the default")
	require.NoError(t, n.Set("copa"))
	require.NoError(t, n.Set("bbr,cubic"))
	assert.Equal(t, []string{"copa", "bbr", "cubic"}, list, "the flag twice")
}
