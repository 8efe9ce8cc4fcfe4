package ccp_test

import (
	"fmt"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// An agent sends bytes that Receive takes, and gets those that the flows of its algorithm send. Here both ends are in
// one process.
func ExampleAgent() {
	var sent []ccp.Kind
	a, err := ccp.NewAgent("reno", "", func(b []byte) error {
		m, _, err := ccp.Next(b)
		sent = append(sent, m.Kind)
		return err
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := a.Connect(0, 1); err != nil {
		fmt.Println(err)
		return
	}
	a.Spec().New(cc.Config{MSS: 1448, Params: defaults(a.Spec())})
	c := a.Counters()
	fmt.Println(a.Spec().Name, "flows:", c.Flows, "said ready:", sent[0] == ccp.KindReady)
	// Output:
	// ccp:reno flows: 1 said ready: true
}

// defaults are the settings of an algorithm where none is given.
func defaults(s cc.Spec) cc.Params {
	p, err := s.Resolve(nil)
	if err != nil {
		panic(err)
	}
	return p
}
