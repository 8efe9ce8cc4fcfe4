package capture

// Installed are rules that are in force.
type Installed struct {
	Mode       Mode
	Port       uint16 // of the listener
	Interfaces []string
	Tunnel     bool                // made by the proxy for a tunnel, and not by apply
	Packets    []InstalledCounters // of the families that they capture
}

// InstalledCounters count what the rules have captured of one family.
type InstalledCounters struct {
	Family string // IPv4 or IPv6
	// Packets are the first ones of new connections, since the rules were applied.
	Packets uint64
}

// ReadInstalled returns the rules that are in force. It needs CAP_NET_ADMIN.
func ReadInstalled() (all []Installed, err error) {
	interceptions, err := readInterceptions()
	if err != nil {
		return nil, err
	}
	for _, t := range interceptions {
		one := Installed{Mode: t.mode, Port: t.port, Interfaces: t.interfaces, Tunnel: t.tunnel}
		for i, f := range t.families {
			one.Packets = append(one.Packets, InstalledCounters{"IPv" + f.version, t.packets[i]})
		}
		all = append(all, one)
	}
	return all, nil
}
