package linkstat

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/genetlink/genltest"
	"github.com/mdlayher/netlink"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// These messages are put together by hand, as nl80211 documents them: where the
// tests are run there is no radio, and no emulated one.

const wlan = 3

var nl80211 = genetlink.Family{ID: 40, Version: 1, Name: unix.NL80211_GENL_NAME}

// driver answers as nl80211 would for one interface.
type driver struct {
	kind     uint32 // of the interface
	stations []func(*netlink.AttributeEncoder)
}

// Kinds of interfaces (enum nl80211_iftype).
const (
	asClient = 2
	asAccess = 3
)

func (d *driver) answer(req genetlink.Message, _ netlink.Message) ([]genetlink.Message, error) {
	var out []genetlink.Message
	say := func(fill func(*netlink.AttributeEncoder)) error {
		ae := netlink.NewAttributeEncoder()
		fill(ae)
		data, err := ae.Encode()
		out = append(out, genetlink.Message{Data: data})
		return err
	}
	var err error
	switch req.Header.Command {
	case unix.NL80211_CMD_GET_INTERFACE:
		err = say(func(ae *netlink.AttributeEncoder) {
			ae.Uint32(unix.NL80211_ATTR_IFINDEX, wlan)
			ae.Uint32(unix.NL80211_ATTR_WIPHY, 1)
			ae.Uint32(unix.NL80211_ATTR_IFTYPE, d.kind)
			ae.Nested(unix.NL80211_ATTR_TXQ_STATS, func(ae *netlink.AttributeEncoder) error {
				ae.Uint32(unix.NL80211_TXQ_STATS_BACKLOG_BYTES, 90_840)
				ae.Uint32(unix.NL80211_TXQ_STATS_BACKLOG_PACKETS, 60)
				ae.Uint32(unix.NL80211_TXQ_STATS_DROPS, 7)
				return nil
			})
		})
	case unix.NL80211_CMD_GET_WIPHY: // in parts, of which one has the limit
		err = say(func(ae *netlink.AttributeEncoder) { ae.Uint32(unix.NL80211_ATTR_WIPHY, 1) })
		if err == nil {
			err = say(func(ae *netlink.AttributeEncoder) { ae.Uint32(unix.NL80211_ATTR_TXQ_LIMIT, 8192) })
		}
	case unix.NL80211_CMD_GET_STATION:
		for _, s := range d.stations {
			if err == nil {
				err = say(s)
			}
		}
	default:
		return nil, genltest.Error(int(unix.EOPNOTSUPP))
	}
	return out, err
}

// stationSays is what is told of a station: its rate in Mbit/s, what gets through
// in Mbit/s, and how many frames of 1500 bytes were sent and given up.
func stationSays(mac string, rate, expected, sent, failed uint32) func(*netlink.AttributeEncoder) {
	return func(ae *netlink.AttributeEncoder) {
		hw, _ := net.ParseMAC(mac)
		ae.Uint32(unix.NL80211_ATTR_IFINDEX, wlan)
		ae.Bytes(unix.NL80211_ATTR_MAC, hw)
		ae.Nested(unix.NL80211_ATTR_STA_INFO, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(unix.NL80211_STA_INFO_TX_BITRATE, func(ae *netlink.AttributeEncoder) error {
				ae.Uint32(unix.NL80211_RATE_INFO_BITRATE32, rate*10)
				return nil
			})
			ae.Uint32(unix.NL80211_STA_INFO_TX_PACKETS, sent)
			ae.Uint64(unix.NL80211_STA_INFO_TX_BYTES64, uint64(sent)*1500)
			ae.Uint32(unix.NL80211_STA_INFO_TX_FAILED, failed)
			ae.Uint32(unix.NL80211_STA_INFO_EXPECTED_THROUGHPUT, expected*1000)
			return nil
		})
	}
}

func (d *driver) machine(t *testing.T) *machine {
	t.Helper()
	conn := genltest.Dial(genltest.ServeFamily(nl80211, d.answer))
	t.Cleanup(func() { conn.Close() })
	return &machine{generic: conn}
}

func TestARadioTellsOfItsStations(t *testing.T) {
	d := &driver{kind: asAccess, stations: []func(*netlink.AttributeEncoder){
		stationSays("02:00:00:00:00:01", 54, 24, 1000, 10),
		stationSays("02:00:00:00:00:02", 6, 4, 0, 0),
	}}
	m := d.machine(t)
	r, err := m.describeRadio(wlan)
	require.NoError(t, err)
	require.NotNil(t, r)
	assert.False(t, r.client)
	assert.Equal(t, 8192, r.packets)

	dev := &device{index: wlan, radio: r}
	stations, err := m.listStations(dev)
	require.NoError(t, err)
	assert.Equal(t, []station{
		{mac: "\x02\x00\x00\x00\x00\x01", rate: 54_000_000, expected: 24_000_000, frame: 1500, failed: 10},
		{mac: "\x02\x00\x00\x00\x00\x02", rate: 6_000_000, expected: 4_000_000},
	}, stations)

	read := reading{dropped: 1}
	require.NoError(t, m.addRadioQueue(dev, &read))
	assert.Equal(t, reading{dropped: 8, backlog: 90_840, waiting: 60}, read)

	d.kind = asClient
	r, err = m.describeRadio(wlan)
	require.NoError(t, err)
	assert.True(t, r.client)
}

func TestAnInterfaceThatIsNoRadio(t *testing.T) {
	conn := genltest.Dial(genltest.ServeFamily(nl80211,
		func(genetlink.Message, netlink.Message) ([]genetlink.Message, error) {
			return nil, genltest.Error(int(unix.ENODEV))
		}))
	defer conn.Close()
	r, err := (&machine{generic: conn}).describeRadio(wlan)
	require.NoError(t, err)
	assert.Nil(t, r)

	conn = genltest.Dial(genltest.ServeFamily(nl80211,
		func(genetlink.Message, netlink.Message) ([]genetlink.Message, error) {
			return make([]genetlink.Message, 2), nil
		}))
	_, err = (&machine{generic: conn}).describeRadio(wlan)
	assert.EqualError(t, err, "linkstat: nl80211: read the interface: 2 answers")
	require.NoError(t, conn.Close())

	conn = genltest.Dial(func(genetlink.Message, netlink.Message) ([]genetlink.Message, error) {
		return nil, genltest.Error(int(unix.ENOENT)) // nobody knows the family
	})
	defer conn.Close()
	r, err = (&machine{generic: conn}).describeRadio(wlan)
	require.NoError(t, err)
	assert.Nil(t, r)
}

func TestWhatTheRadioLosesIsCountedFromWhenItIsFirstHeard(t *testing.T) {
	says := func(failed uint32) station { return station{mac: "a", frame: 1500, failed: failed} }
	var l listener
	l.updateFrom(says(1000), nil)
	assert.Zero(t, l.lost, "before our time")
	l.updateFrom(says(1010), nil)
	assert.EqualValues(t, 10*1448, l.lost, "payload")
	l.updateFrom(says(3), nil)
	assert.EqualValues(t, 10*1448, l.lost, "it has come back, and counts anew")
	l.updateFrom(says(5), nil)
	assert.EqualValues(t, 12*1448, l.lost)
}

func TestStationsDivideTheAirAndNotItsRate(t *testing.T) {
	host := netip.MustParseAddr("192.168.7.9")
	m := newMeter(20 * time.Millisecond)
	m.addReading(at(0, reading{}))
	whole := link{mtu: 1500}.makeHint(m, Users{Flows: 4, Hosts: 2})
	l := listener{station: station{rate: 54_000_000, expected: 24_000_000}, hosts: []netip.Addr{host}, lost: 99}

	h := l.makeHint(whole, 2)
	assert.EqualValues(t, 54_000_000, h.LinkRate)
	assert.EqualValues(t, 12_000_000, h.Capacity, "what gets through, for half of the time")
	assert.EqualValues(t, 12_000_000, h.FairShare)
	assert.Equal(t, cc.Bytes(99), h.RadioLost)
	assert.Equal(t, 4, h.Flows)

	bounded := link{mtu: 1500, rate: 20_000_000}.makeHint(m, Users{Hosts: 1})
	assert.EqualValues(t, 20_000_000, l.makeHint(bounded, 1).LinkRate, "but no more than the link behind it carries")
	silent := listener{}
	assert.Zero(t, silent.makeHint(whole, 2).Capacity, "not known")
}
