package linkstat

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"github.com/mdlayher/wifi"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// radio is what nl80211 says of an interface.
type radio struct {
	family  genetlink.Family
	client  bool // of an access point: its only station, behind which all hosts are
	packets int  // that the radio's own queues hold at most; 0: not known, or it has none
}

// station is one of the radios that an interface sends to.
type station struct {
	mac      string
	rate     cc.Rate  // physical, of which headers and waits for the air take a part; 0: not known
	expected cc.Rate  // of payload when no other station sends; 0: not known
	frame    cc.Bytes // mean size of the frames sent to it up to now; 0: there was none
	failed   uint32   // frames that were given up; wraps around
}

// describeRadio describes the radio of an interface; nil: it has none.
func (m *machine) describeRadio(index int) (*radio, error) {
	family, err := m.generic.GetFamily(unix.NL80211_GENL_NAME)
	if isMissing(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("linkstat: nl80211: %w", err)
	}
	replies, err := m.sendRequest(family, unix.NL80211_CMD_GET_INTERFACE, 0, interfaceAttribute(index))
	if isMissing(err) {
		return nil, nil
	}
	var known []*wifi.Interface
	if err == nil {
		known, err = wifi.ParseInterfaces(replies)
	}
	if err == nil && len(known) != 1 {
		err = fmt.Errorf("%d answers", len(known))
	}
	if err != nil {
		return nil, fmt.Errorf("linkstat: nl80211: read the interface: %w", err)
	}
	r := &radio{family: family, client: known[0].Type == wifi.InterfaceTypeStation}
	r.packets, err = m.txqLimit(family, known[0].PHY)
	return r, err
}

func interfaceAttribute(index int) *netlink.AttributeEncoder {
	ae := netlink.NewAttributeEncoder()
	ae.Uint32(unix.NL80211_ATTR_IFINDEX, uint32(index))
	return ae
}

// txqLimit is how many packets the radio's queues hold; 0: it does not say.
func (m *machine) txqLimit(family genetlink.Family, phy int) (packets int, err error) {
	ae := netlink.NewAttributeEncoder()
	ae.Uint32(unix.NL80211_ATTR_WIPHY, uint32(phy))
	ae.Flag(unix.NL80211_ATTR_SPLIT_WIPHY_DUMP, true)
	replies, err := m.sendRequest(family, unix.NL80211_CMD_GET_WIPHY, netlink.Dump, ae)
	if err == nil {
		err = eachAttribute(replies, func(ad *netlink.AttributeDecoder) {
			if ad.Type() == unix.NL80211_ATTR_TXQ_LIMIT {
				packets = int(ad.Uint32())
			}
		})
	}
	if err != nil {
		return 0, fmt.Errorf("linkstat: nl80211: read the radio: %w", err)
	}
	return packets, nil
}

// addRadioQueue adds to r what waits in the radio's own queues, which stand in for a
// queueing discipline.
func (m *machine) addRadioQueue(d *device, r *reading) error {
	replies, err := m.sendRequest(d.radio.family, unix.NL80211_CMD_GET_INTERFACE, 0, interfaceAttribute(d.index))
	if err == nil {
		err = eachAttribute(replies, func(ad *netlink.AttributeDecoder) {
			if ad.Type() == unix.NL80211_ATTR_TXQ_STATS {
				ad.Nested(r.decodeTXQ)
			}
		})
	}
	if err != nil {
		return fmt.Errorf("linkstat: nl80211: read the interface's queue: %w", err)
	}
	return nil
}

func (r *reading) decodeTXQ(ad *netlink.AttributeDecoder) error {
	for ad.Next() {
		switch ad.Type() {
		case unix.NL80211_TXQ_STATS_BACKLOG_BYTES:
			r.backlog = cc.Bytes(ad.Uint32())
		case unix.NL80211_TXQ_STATS_BACKLOG_PACKETS:
			r.waiting = int(ad.Uint32())
		case unix.NL80211_TXQ_STATS_DROPS:
			r.dropped += ad.Uint32()
		}
	}
	return nil
}

// listStations are all that an interface sends to.
func (m *machine) listStations(d *device) ([]station, error) {
	replies, err := m.sendRequest(d.radio.family, unix.NL80211_CMD_GET_STATION, netlink.Dump, interfaceAttribute(d.index))
	if err != nil {
		return nil, fmt.Errorf("linkstat: nl80211: read stations: %w", err)
	}
	var out []station
	for _, reply := range replies {
		info, err := wifi.ParseStationInfo(reply.Data)
		if err != nil {
			return nil, fmt.Errorf("linkstat: nl80211: read stations: %w", err)
		}
		s := station{mac: string(info.HardwareAddr), failed: uint32(info.TransmitFailed)}
		if err := s.decodeSent(reply.Data); err != nil {
			return nil, fmt.Errorf("linkstat: nl80211: read stations: %w", err)
		}
		out = append(out, s)
	}
	return out, nil
}

// decodeSent fills in what was sent to the station, and how fast. The library has it in words that are too short
// on machines of 32 bits.
func (s *station) decodeSent(attrs []byte) error {
	ad, err := netlink.NewAttributeDecoder(attrs)
	if err != nil {
		return err
	}
	var bytes, packets uint64
	for ad.Next() {
		if ad.Type() != unix.NL80211_ATTR_STA_INFO {
			continue
		}
		ad.Nested(func(ad *netlink.AttributeDecoder) error {
			for ad.Next() {
				switch ad.Type() {
				case unix.NL80211_STA_INFO_EXPECTED_THROUGHPUT:
					s.expected = cc.Rate(ad.Uint32()) * 1000
				case unix.NL80211_STA_INFO_TX_BYTES64:
					bytes = ad.Uint64()
				case unix.NL80211_STA_INFO_TX_PACKETS:
					packets = uint64(ad.Uint32())
				case unix.NL80211_STA_INFO_TX_BITRATE:
					ad.Nested(s.decodeBitrate)
				}
			}
			return nil
		})
	}
	if packets > 0 {
		s.frame = cc.Bytes(bytes / packets)
	}
	return ad.Err()
}

func (s *station) decodeBitrate(ad *netlink.AttributeDecoder) error {
	const unit = 100 * 1000 // bits per second
	for ad.Next() {
		switch ad.Type() {
		case unix.NL80211_RATE_INFO_BITRATE32:
			s.rate = cc.Rate(ad.Uint32()) * unit
		case unix.NL80211_RATE_INFO_BITRATE:
			s.rate = cmp.Or(s.rate, cc.Rate(ad.Uint16())*unit)
		}
	}
	return nil
}

// listener is a station, the hosts behind it, and what was lost on the way to it.
type listener struct {
	station
	hosts []netip.Addr
	lost  cc.Bytes // payload of frames that were given up since the source began, by their mean size
}

// updateFrom takes in newer figures of the station.
func (l *listener) updateFrom(s station, hosts []netip.Addr) {
	if failed := s.failed - l.failed; l.mac == s.mac && failed < 1<<31 { // else it has come back, and counts anew
		l.lost += cc.Bytes(failed) * max(0, s.frame-packetHeaders)
	}
	l.station, l.hosts = s, hosts
}

// makeHint makes the hint for a station's hosts of the one for the whole link, which that many hosts
// divide. Stations divide the time on the air, and each has a rate of its own.
func (l *listener) makeHint(h cc.Hint, hosts int) cc.Hint {
	h.LinkRate = leastKnownOf(l.rate, h.LinkRate)
	h.FairShare = leastKnownOf(l.expected/cc.Rate(max(1, hosts)), h.FairShare)
	h.Capacity, h.RadioLost = h.FairShare, l.lost
	return h
}
