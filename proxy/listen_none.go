//go:build nonetstack

package proxy

import (
	"fmt"
	"log/slog"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
)

// openTunnelListener refuses. The check of a configuration does so before.
func openTunnelListener(l ListenerConfig, _ func() cc.Time, _ *slog.Logger) (Listener, error) {
	return nil, fmt.Errorf("proxy: listener %q: mode %s: %s", l.Name, l.Mode, access.NoNetstack)
}
