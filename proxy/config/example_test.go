package config_test

import (
	"errors"
	"fmt"

	"github.com/penstock-net/penstock/proxy/config"
)

// A mistake has its place, its key and its cure; the others of the file have a line each.
func ExampleParse() {
	_, err := config.Parse([]byte(`listeners:
- {name: lan, mode: mixed, address: "127.0.0.1:1080"}
envelope: ebfp
limits: {bufer: 64KiB}
`))
	var mistake *config.Error
	if errors.As(err, &mistake) {
		fmt.Println(mistake)
		fmt.Print(mistake.Excerpt)
		for _, line := range config.Rest(err) {
			fmt.Println(line)
		}
	}
	// Output:
	// 3:11: envelope: "ebfp" is not one of auto, ebpf, bbr, cubic, reno; did you mean ebpf?
	//    1 | listeners:
	//    2 | - {name: lan, mode: mixed, address: "127.0.0.1:1080"}
	// >  3 | envelope: ebfp
	//                  ^
	//    4 | limits: {bufer: 64KiB}
	// 4:10: limits.bufer: unknown key; did you mean buffer?
}

// A configuration gives the rules with what they do.
func ExampleConfig_Routes() {
	c, err := config.Parse([]byte(`
listeners: [{name: lan, mode: mixed, address: "127.0.0.1:1080"}]
rules:
- {name: no-mail, match: {ports: [25]}, refuse: "no mail from here"}
- {name: phones, match: {source: [10.0.0.0/24]}, down: {max_rate: 20mbit}}
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	routes, err := c.Routes()
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, r := range routes {
		fmt.Printf("%q refuse=%q down=%s up to %v\n", r.Rule, r.Refuse, r.Down.Algorithm, r.Down.MaxRate)
	}
	// Output:
	// "no-mail" refuse="no mail from here" down= up to 0bit
	// "phones" refuse="" down=penstock up to 20mbit
	// "" refuse="" down=penstock up to 0bit
}
