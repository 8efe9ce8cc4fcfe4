package proxy

import (
	"net/netip"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// dscpTowards returns what the packets to an address are marked with, and whether all that the rules may say of it is
// to keep the client's mark. Then the SYN carries it, too.
func (c *connection) dscpTowards(target netip.AddrPort) (dscp uint8, keep bool) {
	for _, v := range c.decidedBy.policy.Prospects(nil, c.policyFacts(target)) {
		if v.Refuse == "" && !v.KeepDSCP {
			return 0, false
		}
	}
	return receivedDSCP(c.client.conn), true
}

// carryDSCP marks the packets of each leg as those that came over the other one. A client whose server sets no mark
// is answered with its own.
func (c *connection) carryDSCP() {
	of := receivedDSCP(c.client.conn)
	back := receivedDSCP(c.server.conn)
	if back == 0 {
		back = of
	}
	c.setDSCP(&c.server, of)
	c.setDSCP(&c.client, back)
}

func (c *connection) setDSCP(l *leg, dscp uint8) {
	m, ok := l.conn.(datapath.Marker)
	if !ok {
		return
	}
	if err := m.SetDSCP(dscp); err != nil {
		c.srv.log.Debug("a DSCP was not carried on", "id", c.id, "side", c.sideOf(l), "err", err)
	}
}

// receivedDSCP is that of what came over a leg in the handshake; 0: none, or its transport has none.
func receivedDSCP(conn datapath.Conn) uint8 {
	if m, ok := conn.(datapath.Marker); ok {
		return m.ReceivedDSCP()
	}
	return 0
}
