package proxy

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// A connection leaves a line, but no more than linesPerSecond of them do, after linesAtOnce
// in a row: writing one takes a tenth of what a short connection does. At level debug
// each leaves one.
const (
	linesPerSecond = 100
	linesAtOnce    = 1000
)

// lines bounds how many connections leave a line.
type lines struct {
	mu      sync.Mutex
	debt    time.Duration // what the lines written since take, at linesPerSecond
	at      cc.Time       // as of then
	skipped uint64        // since the last line
}

// takeLine says whether there may be a line now, and how many were left out since the last.
func (l *lines) takeLine(now cc.Time, all bool) (skipped uint64, ok bool) {
	const each = time.Second / linesPerSecond
	const most = linesAtOnce * each
	l.mu.Lock()
	defer l.mu.Unlock()
	l.debt = max(0, l.debt-now.Sub(l.at))
	l.at = now
	if l.debt > most-each && !all {
		l.skipped++
		return 0, false
	}
	l.debt = min(l.debt+each, most)
	skipped, l.skipped = l.skipped, 0
	return skipped, true
}

// beginLine returns the beginning of a connection's line; nil: there is none.
func (s *Server) beginLine(id uint64) []slog.Attr {
	if !s.currentSettings().cfg.Log.Flows {
		return nil
	}
	skipped, ok := s.lines.takeLine(s.clock(), s.log.Enabled(context.Background(), slog.LevelDebug))
	if !ok {
		return nil
	}
	attrs := append(make([]slog.Attr, 0, 16), slog.Uint64("id", id))
	if skipped > 0 {
		attrs = append(attrs, slog.Uint64("skipped", skipped))
	}
	return attrs
}

// logClosed writes the one line of a connection that was relayed.
func (s *Server) logClosed(f *FlowInfo, cause Cause, err error) {
	attrs := s.beginLine(f.ID)
	if attrs == nil {
		return
	}
	attrs = append(attrs, slog.String("listener", f.Listener), slog.String("rule", f.Rule),
		addressAttr("client", f.Source), addressAttr("target", f.Target), slog.String("host", f.Host),
		slog.String("closed_by", string(cause.Who)), slog.String("reason", string(cause.How)),
		slog.Duration("duration", f.Age.Round(time.Millisecond)), slog.Duration("setup",
			f.Setup.Round(time.Microsecond)),
		f.Down.logAttrs("down", &f.Client), f.Up.logAttrs("up", &f.Server))
	if err != nil {
		attrs = append(attrs, slog.Any("err", err))
	}
	s.log.LogAttrs(context.Background(), slog.LevelInfo, "flow closed", attrs...)
}

// logAttrs describes a direction and the leg it sent to.
func (d *DirectionInfo) logAttrs(name string, leg *datapath.Info) slog.Attr {
	attrs := append(make([]slog.Attr, 0, 12), slog.String("algorithm", d.Algorithm),
		slog.Int64("bytes", int64(d.Written)))
	if unwritten := d.Read - d.Written; unwritten > 0 {
		attrs = append(attrs, slog.Int64("undelivered", int64(unwritten)))
	}
	srtt, minRTT := leg.SRTT, leg.MinRTT
	if d.Managed {
		srtt, minRTT = d.Flow.SRTT, d.Flow.MinRTT
		attrs = append(attrs, slog.String("group", d.Flow.Group),
			slog.Int64("lost", int64(d.Flow.Lost)), slog.Int("timeouts", d.Flow.Timeouts))
		for by, t := range d.Flow.Limited {
			if t > 0 {
				attrs = append(attrs, slog.Duration("limited_"+flow.LimitedBy(by).String(), t.Round(time.Millisecond)))
			}
		}
	}
	attrs = append(attrs, slog.Duration("srtt", srtt.Round(time.Microsecond)),
		slog.Duration("min_rtt", minRTT.Round(time.Microsecond)), slog.Int64("retransmitted", int64(leg.Retransmitted)))
	return slog.GroupAttrs(name, attrs...)
}

// logRejected writes the one line of a connection that was not.
func (s *Server) logRejected(c *connection, r *rejection) {
	attrs := s.beginLine(c.id)
	if attrs == nil {
		return
	}
	s.log.LogAttrs(context.Background(), slog.LevelInfo, "flow refused", append(attrs,
		slog.String("listener", c.listener.cfg.Name), addressAttr("client", c.clientAddress()),
		addressAttr("target", c.chosen.Target),
		slog.String("host", c.chosen.Host), slog.String("reason", string(r.reason)),
		slog.Duration("duration", s.clock().Sub(c.started).Round(time.Microsecond)), slog.Any("err", r.err))...)
}

// logLimited writes, at level debug, the line of a connection that a limit is in the way of.
func (s *Server) logLimited(l *listenerState, client netip.AddrPort, reason Reason) {
	if s.currentSettings().cfg.Log.Flows {
		s.log.Debug("flow refused", "listener", l.cfg.Name, "client", client, "reason", reason)
	}
}

// addressAttr is empty where it is not known.
func addressAttr(key string, a netip.AddrPort) slog.Attr {
	if !a.IsValid() {
		return slog.String(key, "")
	}
	return slog.String(key, a.String())
}
