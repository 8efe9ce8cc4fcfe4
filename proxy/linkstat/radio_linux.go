package linkstat

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// radio is what nl80211 says of an interface.
type radio struct {
	// client reports whether the interface is a client of an access point. The access point is
	// then its only station, and all hosts are behind it.
	client bool
	// packets is the limit of the radio's own queues. 0: not known, or it has no queues.
	packets int
}

// station is one of the radios that an interface sends to.
type station struct {
	mac string
	// rate is that of the physical layer. Headers and waits for the medium take a part of it. 0: not known.
	rate cc.Rate
	// expected is the rate of payload when no other station sends. 0: not known.
	expected cc.Rate
	frame    cc.Bytes // mean size of the frames sent to it up to now; 0: there was none
	failed   uint32   // frames that were not acknowledged after all retries; wraps around
}

// describeRadio describes the radio of an interface; nil: it has none.
func (m *machine) describeRadio(index int) (*radio, error) {
	replies, err := m.ask(unix.NL80211_GENL_NAME, unix.NL80211_CMD_GET_INTERFACE, 0, interfaceAttribute(index))
	if isMissing(err) {
		return nil, nil
	}
	if err == nil && len(replies) != 1 {
		err = fmt.Errorf("%d answers", len(replies))
	}
	if err != nil {
		return nil, fmt.Errorf("linkstat: nl80211: read the interface: %w", err)
	}
	r := &radio{client: replies[0].number(unix.NL80211_ATTR_IFTYPE) == unix.NL80211_IFTYPE_STATION}
	r.packets, err = m.readTXQLimit(uint32(replies[0].number(unix.NL80211_ATTR_WIPHY)))
	return r, err
}

// interfaceAttribute returns the attribute that selects an interface in nl80211.
func interfaceAttribute(index int) *nl.RtAttr {
	return nl.NewRtAttr(unix.NL80211_ATTR_IFINDEX, nl.Uint32Attr(uint32(index)))
}

// readTXQLimit returns how many packets the radio's queues hold; 0: it does not say.
func (m *machine) readTXQLimit(phy uint32) (packets int, err error) {
	replies, err := m.ask(unix.NL80211_GENL_NAME, unix.NL80211_CMD_GET_WIPHY, unix.NLM_F_DUMP,
		nl.NewRtAttr(unix.NL80211_ATTR_WIPHY, nl.Uint32Attr(phy)), nl.NewRtAttr(unix.NL80211_ATTR_SPLIT_WIPHY_DUMP, nil))
	if err != nil {
		return 0, fmt.Errorf("linkstat: nl80211: read the radio: %w", err)
	}
	for _, part := range replies {
		if _, ok := part[unix.NL80211_ATTR_TXQ_LIMIT]; ok {
			packets = int(uint32(part.number(unix.NL80211_ATTR_TXQ_LIMIT)))
		}
	}
	return packets, nil
}

// addRadioQueue adds to r what waits in the radio's own queues, which replace a queueing discipline.
func (m *machine) addRadioQueue(d *device, r *reading) error {
	replies, err := m.ask(unix.NL80211_GENL_NAME, unix.NL80211_CMD_GET_INTERFACE, 0, interfaceAttribute(d.index))
	if err != nil {
		return fmt.Errorf("linkstat: nl80211: read the interface's queue: %w", err)
	}
	for _, reply := range replies {
		stats := reply.nested(unix.NL80211_ATTR_TXQ_STATS)
		r.backlog = cc.Bytes(uint32(stats.number(unix.NL80211_TXQ_STATS_BACKLOG_BYTES)))
		r.waiting = int(uint32(stats.number(unix.NL80211_TXQ_STATS_BACKLOG_PACKETS)))
		r.dropped += uint32(stats.number(unix.NL80211_TXQ_STATS_DROPS))
	}
	return nil
}

// listStations returns all stations that an interface sends to.
func (m *machine) listStations(d *device) ([]station, error) {
	replies, err := m.ask(unix.NL80211_GENL_NAME, unix.NL80211_CMD_GET_STATION, unix.NLM_F_DUMP,
		interfaceAttribute(d.index))
	if err != nil {
		return nil, fmt.Errorf("linkstat: nl80211: read stations: %w", err)
	}
	out := make([]station, 0, len(replies))
	for _, reply := range replies {
		out = append(out, decodeStation(reply))
	}
	return out, nil
}

// decodeStation reads the station of one answer.
func decodeStation(reply attributes) station {
	const kbit, unit = 1000, 100 * 1000 // bits per second
	info := reply.nested(unix.NL80211_ATTR_STA_INFO)
	s := station{
		mac:      string(reply[unix.NL80211_ATTR_MAC]),
		failed:   uint32(info.number(unix.NL80211_STA_INFO_TX_FAILED)),
		expected: cc.Rate(info.number(unix.NL80211_STA_INFO_EXPECTED_THROUGHPUT)) * kbit,
	}
	bitrate := info.nested(unix.NL80211_STA_INFO_TX_BITRATE)
	s.rate = cc.Rate(bitrate.number(unix.NL80211_RATE_INFO_BITRATE32)) * unit
	if s.rate == 0 { // old drivers
		s.rate = cc.Rate(bitrate.number(unix.NL80211_RATE_INFO_BITRATE)) * unit
	}
	if packets := info.number(unix.NL80211_STA_INFO_TX_PACKETS); packets > 0 {
		s.frame = cc.Bytes(info.number(unix.NL80211_STA_INFO_TX_BYTES64) / packets)
	}
	return s
}

// stationState is a station with the hosts behind it.
type stationState struct {
	station
	hosts []netip.Addr
	// lost is the payload of failed frames since the source began, by the mean size of frames.
	lost cc.Bytes
}

// updateFrom stores newer figures of the station, and adds what was lost since.
func (l *stationState) updateFrom(s station, hosts []netip.Addr) {
	// The counter of a station that has left and come back begins at 0. The difference is then above 1<<31.
	if failed := s.failed - l.failed; l.mac == s.mac && failed < 1<<31 {
		l.lost += cc.Bytes(failed) * max(0, s.frame-packetHeaders)
	}
	l.station, l.hosts = s, hosts
}

// makeHint makes the hint for a station's hosts from the hint h for the whole link, which has that number of hosts.
// Each station has a rate of its own, and stations share the airtime.
func (l *stationState) makeHint(h cc.Hint, hosts int) cc.Hint {
	h.LinkRate = leastKnownOf(l.rate, h.LinkRate)
	h.FairShare = leastKnownOf(l.expected/cc.Rate(max(1, hosts)), h.FairShare)
	h.Capacity, h.RadioLost = h.FairShare, l.lost
	return h
}
