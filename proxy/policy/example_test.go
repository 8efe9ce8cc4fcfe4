package policy_test

import (
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/proxy/policy"
)

// The first rule that matches decides. Facts that are not known yet match nothing.
func ExamplePolicy_Decide() {
	p, err := policy.New([]policy.Rule{
		{Name: "no-mail", Match: policy.Match{Ports: []policy.PortRange{{First: 25, Last: 25}}}, Refuse: "no mail from here"},
		{
			Name:  "phones",
			Match: policy.Match{Sources: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}},
			Down:  policy.Terms{Algorithm: "copa"},
		},
	}, policy.Rule{Down: policy.Terms{Algorithm: "penstock"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, target := range []string{"192.0.2.1:25", "192.0.2.1:443"} {
		v := p.Decide(policy.Facts{
			Listener: "lan",
			Source:   netip.MustParseAddrPort("10.0.0.7:40000"),
			Target:   netip.MustParseAddrPort(target),
		})
		fmt.Printf("%s: rule %s, refuse %q, down %q in group %q\n", target, v.Rule, v.Refuse, v.Down.Algorithm, v.Down.Group)
	}
	// Output:
	// 192.0.2.1:25: rule no-mail, refuse "no mail from here", down "" in group ""
	// 192.0.2.1:443: rule phones, refuse "", down "copa" in group "down|lan|10.0.0.7"
}
