package proxy_test

import (
	"net/netip"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

func (b *bench) setAddresses(list ...string) {
	addrs := make([]netip.Addr, len(list))
	for i, a := range list {
		addrs[i] = netip.MustParseAddr(a)
	}
	b.addressed.Store(&addrs)
}

// Legs of the bench are at 192.0.2.1.
func TestAConnectionIsResetOnceItsAddressHasLeftTheMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		defer b.end()
		client, server := b.connect()
		time.Sleep(5 * time.Second)
		b.setAddresses("192.0.2.7")
		time.Sleep(25 * time.Second)
		b.setAddresses("192.0.2.7", "192.0.2.1")
		time.Sleep(time.Minute)
		client.send([]byte("x"))
		_, err := server.take(1)
		require.NoError(t, err, "it came back in time")

		b.setAddresses("192.0.2.7")
		began := time.Now()
		_, err = client.take(1)
		require.ErrorIs(t, err, syscall.ECONNRESET)
		assert.InDelta(t, 32, time.Since(began).Seconds(), 2)
		synctest.Wait()
		assert.True(t, server.wasReset())
		assert.Contains(t, b.logs.String(), "closed_by=proxy reason=address_gone")
	})
}

// A transparent socket has an address that is not this machine's.
func TestAForeignAddressNeverLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(_ *config.Config, b *bench) { b.setAddresses("192.0.2.7") })
		defer b.end()
		time.Sleep(5 * time.Second)
		client, server := b.connect()
		b.setAddresses()
		time.Sleep(time.Minute)
		client.send([]byte("x"))
		_, err := server.take(1)
		require.NoError(t, err)
	})
}

// The address of a captured connection has moved to the machine that answers (VRRP).
func TestTransparentLegsOutliveAnAddressThatMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(c *config.Config, _ *bench) {
			c.Listeners[0] = access.Listener{Name: "fake", Mode: "tproxy", Address: "192.0.2.1:1", KeepClient: true}
		})
		defer b.end()
		time.Sleep(5 * time.Second)
		client, server := b.connect()
		b.setAddresses("192.0.2.7")
		time.Sleep(time.Minute)
		client.send([]byte("x"))
		_, err := server.take(1)
		require.NoError(t, err)
	})
}
