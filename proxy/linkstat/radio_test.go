package linkstat

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// These messages are put together by hand, as nl80211 documents them: where the
// tests are run there is no radio, and no emulated one.

const wlan = 3

// driver answers as nl80211 would for one interface.
type driver struct {
	kind     uint32 // of the interface
	stations []*nl.RtAttr
	failure  error // nil: it answers
	answers  int   // to GET_INTERFACE; 0: one
}

// ask stands in for machine.askFamily.
func (d *driver) ask(_ string, command uint8, _ int, _ ...*nl.RtAttr) ([]attributes, error) {
	if d.failure != nil {
		return nil, d.failure
	}
	switch command {
	case unix.NL80211_CMD_GET_INTERFACE:
		answer := attributesOf(
			number(unix.NL80211_ATTR_IFINDEX, wlan),
			number(unix.NL80211_ATTR_WIPHY, 1),
			number(unix.NL80211_ATTR_IFTYPE, d.kind),
			nest(unix.NL80211_ATTR_TXQ_STATS,
				number(unix.NL80211_TXQ_STATS_BACKLOG_BYTES, 90_840),
				number(unix.NL80211_TXQ_STATS_BACKLOG_PACKETS, 60),
				number(unix.NL80211_TXQ_STATS_DROPS, 7)))
		return slices.Repeat([]attributes{answer}, max(1, d.answers)), nil
	case unix.NL80211_CMD_GET_WIPHY: // in parts, one of them with the limit
		return []attributes{
			attributesOf(number(unix.NL80211_ATTR_WIPHY, 1)),
			attributesOf(number(unix.NL80211_ATTR_TXQ_LIMIT, 8192)),
		}, nil
	case unix.NL80211_CMD_GET_STATION:
		var all []attributes
		for _, s := range d.stations {
			all = append(all, attributesOf(s).nested(0))
		}
		return all, nil
	}
	return nil, unix.EOPNOTSUPP
}

// describe makes the message about a station: its rate and the rate of payload in Mbit/s, and how
// many frames of 1500 bytes were sent and given up.
func describe(mac string, rate, expected, sent, failed uint32) *nl.RtAttr {
	hw, _ := net.ParseMAC(mac)
	return nest(0,
		number(unix.NL80211_ATTR_IFINDEX, wlan),
		nl.NewRtAttr(unix.NL80211_ATTR_MAC, hw),
		nest(unix.NL80211_ATTR_STA_INFO,
			nest(unix.NL80211_STA_INFO_TX_BITRATE, number(unix.NL80211_RATE_INFO_BITRATE32, rate*10)),
			number(unix.NL80211_STA_INFO_TX_PACKETS, sent),
			nl.NewRtAttr(unix.NL80211_STA_INFO_TX_BYTES64, nl.Uint64Attr(uint64(sent)*1500)),
			number(unix.NL80211_STA_INFO_TX_FAILED, failed),
			number(unix.NL80211_STA_INFO_EXPECTED_THROUGHPUT, expected*1000)))
}

func TestARadioTellsOfItsStations(t *testing.T) {
	d := &driver{kind: unix.NL80211_IFTYPE_AP, stations: []*nl.RtAttr{
		describe("02:00:00:00:00:01", 54, 24, 1000, 10),
		describe("02:00:00:00:00:02", 6, 4, 0, 0),
	}}
	m := &machine{ask: d.ask}
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

	d.kind = unix.NL80211_IFTYPE_STATION
	r, err = m.describeRadio(wlan)
	require.NoError(t, err)
	assert.True(t, r.client)
}

func TestAnInterfaceThatIsNoRadio(t *testing.T) {
	for _, tt := range []struct {
		name string
		driver
		want string
	}{
		{"nl80211 does not know the interface", driver{failure: unix.ENODEV}, ""},
		{"the kernel does not know nl80211", driver{failure: unix.ENOENT}, ""},
		{"there are two answers", driver{answers: 2}, "linkstat: nl80211: read the interface: 2 answers"},
	} {
		r, err := (&machine{ask: tt.ask}).describeRadio(wlan)
		assert.Nil(t, r, tt.name)
		if tt.want == "" {
			assert.NoError(t, err, tt.name)
		} else {
			assert.EqualError(t, err, tt.want, tt.name)
		}
	}
}

func TestWhatTheRadioLosesIsCountedFromWhenItIsFirstHeard(t *testing.T) {
	says := func(failed uint32) station { return station{mac: "a", frame: 1500, failed: failed} }
	var l stationState
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
	l := stationState{station: station{rate: 54_000_000, expected: 24_000_000}, hosts: []netip.Addr{host}, lost: 99}

	h := l.makeHint(whole, 2)
	assert.EqualValues(t, 54_000_000, h.LinkRate)
	assert.EqualValues(t, 12_000_000, h.Capacity, "what gets through, for half of the time")
	assert.EqualValues(t, 12_000_000, h.FairShare)
	assert.Equal(t, cc.Bytes(99), h.RadioLost)
	assert.Equal(t, 4, h.Flows)

	bounded := link{mtu: 1500, rate: 20_000_000}.makeHint(m, Users{Hosts: 1})
	assert.EqualValues(t, 20_000_000, l.makeHint(bounded, 1).LinkRate, "but no more than the link behind it carries")
	silent := stationState{}
	assert.Zero(t, silent.makeHint(whole, 2).Capacity, "not known")
}
