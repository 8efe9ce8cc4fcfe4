package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/penstock-net/penstock/proxy/config"
)

// statusPeriod is how often systemd is told how it goes.
const statusPeriod = 5 * time.Second

// readWithin is how long a notification waits for systemd to read it, and the last of a trace for its reader.
const readWithin = time.Second

// watchHealth tells systemd how it goes and, if it asked, that we are alive: that every
// lock on the way to every connection can still be had.
func (h *service) watchHealth(ctx context.Context) {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	period, alive := statusPeriod, ""
	if every, err := daemon.SdWatchdogEnabled(false); err == nil && every > 0 {
		period, alive = min(period, every/2), daemon.SdNotifyWatchdog+"\n"
	}
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			h.proxy.Groups() // blocks where a group is stuck, and then the watchdog is not told
			h.notifySystemd(alive + h.statusLine())
		}
	}
}

// maxReason bounds what a status shows of an error, in bytes.
const maxReason = 200

// statusLine is what systemctl status shows.
func (h *service) statusLine() string {
	open := h.proxy.Counters().Active
	words := fmt.Sprintf("serving %d connections", open)
	if h.isEnding() {
		words = fmt.Sprintf("draining, %d connections open", open)
	}
	if err := h.reloads.pendingError(); err != nil {
		why := config.Printable(strings.Join(strings.Fields(err.Error()), " "))
		if len(why) > maxReason {
			why = strings.ToValidUTF8(why[:maxReason], "") + "…"
		}
		words += "; the configuration file is not in force: " + why
	}
	return "STATUS=" + words
}

// notifySystemd notifies systemd where it waits for that.
func (h *service) notifySystemd(state string) {
	at := os.Getenv("NOTIFY_SOCKET")
	if at == "" {
		return
	}
	if err := sendNotification(at, state); err != nil {
		h.log.Warn("cannot notify systemd", "state", strings.TrimSpace(state), "err", err)
	}
}

// sendNotification is sd_notify(3), but does not wait for a reader for long.
func sendNotification(at, state string) error {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: at, Net: "unixgram"})
	if err != nil {
		return err
	}
	_ = conn.SetWriteDeadline(time.Now().Add(readWithin))
	_, err = conn.Write([]byte(state))
	return errors.Join(err, conn.Close())
}
