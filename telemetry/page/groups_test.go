package page

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc/flow"
)

func TestAGroupIsCalledByItsAddress(t *testing.T) {
	for name, want := range map[string][2]string{ // label, and in full
		"down|lan|192.168.1.50":                  {"192.168.1.50", "192.168.1.50 (lan)"},
		"down|lan|2001:db8::7":                   {"2001:db8::7", "2001:db8::7 (lan)"},
		"down|lan|10.1.2.0/24":                   {"10.1.2.0/24", "10.1.2.0/24 (lan)"},
		"up|lan|to 192.0.2.1":                    {"to 192.0.2.1", "to 192.0.2.1 (lan)"},
		"up|lan|192.168.1.50":                    {"192.168.1.50, up", "192.168.1.50, up (lan)"},
		"down|lan|to 192.0.2.1":                  {"to 192.0.2.1, down", "to 192.0.2.1, down (lan)"},
		"from down|lan|192.168.1.50":             {"from 192.168.1.50", "from 192.168.1.50 (lan)"},
		"from up|lan|to 192.0.2.1":               {"from 192.0.2.1", "from 192.0.2.1 (lan)"},
		"down|vpn|through phone":                 {"phone", "phone (vpn)"},
		"down|lan|":                              {"all of lan", "all of lan"},
		"up|lan|":                                {"all of lan, up", "all of lan, up"},
		"down|lan|10.1.2.3:999 to 192.0.2.1:443": {"10.1.2.3:999 to 192.0.2.1:443", "10.1.2.3:999 to 192.0.2.1:443 (lan)"},
		"down|satellite":                         {"satellite", "satellite"},
		"up|satellite":                           {"satellite, up", "satellite, up"},
		"from down|satellite":                    {"from satellite", "from satellite"},
		"of another form":                        {"of another form", "of another form"},
		"":                                       {"", ""},
	} {
		label, full := parseGroupName(name).labels()
		assert.Equal(t, want, [2]string{label, full}, name)
	}
}

func TestOneHostOfTwoListenersIsToldApart(t *testing.T) {
	h := hosts{groups: []flow.Group{{Name: "down|lan|192.0.2.7"}, {Name: "down|wifi|192.0.2.7"}, {Name: "down|lan|192.0.2.8"}}}
	var labels []string
	for _, r := range h.allHosts() {
		labels = append(labels, r.Label)
	}
	assert.Equal(t, []string{"192.0.2.7 (lan)", "192.0.2.7 (wifi)", "192.0.2.8"}, labels)
}

func TestHostsAreOrderedByAddress(t *testing.T) {
	host := func(label string) *Host { return &Host{Label: label} }
	order := hostOrder["name"]
	assert.Negative(t, order(host("192.0.2.9"), host("192.0.2.10")), "as numbers")
	assert.Negative(t, order(host("192.0.2.9"), host("2001:db8::1")))
	assert.Negative(t, order(host("192.0.2.9"), host("all of lan")))
	assert.Positive(t, order(host("phone"), host("192.0.2.9")))
	assert.Negative(t, order(host("all of lan"), host("phone")))
	assert.Zero(t, order(host("192.0.2.9"), host("192.0.2.9")))
}

func FuzzParseGroupName(f *testing.F) {
	f.Add("down|lan|192.168.1.50")
	f.Add("from up|lan|to " + netip.IPv6Loopback().String())
	f.Fuzz(func(t *testing.T, name string) {
		label, full := parseGroupName(name).labels()
		assert.Equal(t, name == "", label == "", "%q is called %q", name, label)
		assert.Contains(t, full, label)
	})
}
