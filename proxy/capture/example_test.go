package capture_test

import (
	"fmt"
	"os"

	"github.com/penstock-net/penstock/proxy/capture"
)

// What comes in by lan0 for web servers goes to a REDIRECT listener on port 1081. Apply installs
// these rules, and Print shows them.
func ExampleRules_Print() {
	rules := capture.Rules{
		Mode: capture.Redirect, Port: 1081, IPv4: true, Interfaces: []string{"lan0"},
		Ports: []capture.PortRange{{First: 80, Last: 80}, {First: 443, Last: 443}}, Connected: capture.ConnectedCapture,
	}
	if err := rules.Print(os.Stdout); err != nil {
		fmt.Println(err)
	}
	// Output:
	// # nft takes this whole or not at all.
	// nft -f - <<'END'
	// table inet penstock
	// delete table inet penstock
	// table inet penstock {
	// 	set interfaces {
	// 		type ifname
	// 		elements = { "lan0" }
	// 	}
	// 	set ports {
	// 		type inet_service
	// 		flags interval
	// 		elements = { 80, 443 }
	// 	}
	// 	chain prerouting {
	// 		type nat hook prerouting priority dstnat; policy accept;
	// 		meta mark & 0x02000000 == 0x02000000 return
	// 		meta l4proto != tcp return
	// 		tcp flags & (syn | ack) != syn return
	// 		iifname != @interfaces return
	// 		fib daddr type local return
	// 		meta nfproto ipv4 tcp dport @ports counter redirect to :1081
	// 	}
	// }
	// END
}
