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

// Each connection leaves a line, but at most linesPerSecond of them do after linesAtOnce
// in a row. Writing a line costs a tenth of a short connection. At level debug
// each connection leaves one.
const (
	linesPerSecond = 100
	linesAtOnce    = 1000
)

// flowLog writes the lines of connections that are over, and bounds their number.
type flowLog struct {
	log   *slog.Logger
	clock func() cc.Time

	mu      sync.Mutex
	debt    time.Duration // what the lines written since cost, at linesPerSecond
	at      cc.Time       // when debt was computed
	skipped uint64        // lines left out since the last one
}

// takeLine reports whether a line may be written now, and how many were left out since the last. all lifts the bound.
func (l *flowLog) takeLine(now cc.Time, all bool) (skipped uint64, ok bool) {
	// A token bucket, counted as the time that its missing tokens take to come back.
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
	l.debt = min(l.debt+each, most) // lines at level debug are not owed beyond that
	skipped, l.skipped = l.skipped, 0
	return skipped, true
}

// beginLine returns the first attributes of a connection's line. nil: it has none.
func (l *flowLog) beginLine(id uint64) []slog.Attr {
	skipped, ok := l.takeLine(l.clock(), l.log.Enabled(context.Background(), slog.LevelDebug))
	if !ok {
		return nil
	}
	attrs := append(make([]slog.Attr, 0, 16), slog.Uint64("id", id))
	if skipped > 0 {
		attrs = append(attrs, slog.Uint64("skipped", skipped))
	}
	return attrs
}

// logClosed writes the line of a connection that was relayed.
func (l *flowLog) logClosed(f *FlowInfo, cause Cause, err error) {
	attrs := l.beginLine(f.ID)
	if attrs == nil {
		return
	}
	attrs = append(attrs, slog.String("listener", f.Listener), slog.String("rule", f.Rule),
		addressAttr("client", f.Source), addressAttr("target", f.Target), slog.String("host", f.Host),
		slog.String("closed_by", string(cause.Who)), slog.String("reason", string(cause.How)),
		slog.Duration("duration", f.Age.Round(time.Millisecond)), slog.Duration("setup",
			f.Setup.Round(time.Microsecond)),
		directionAttrs("down", &f.Down, &f.Client), directionAttrs("up", &f.Up, &f.Server))
	if err != nil {
		attrs = append(attrs, slog.Any("err", err))
	}
	l.log.LogAttrs(context.Background(), slog.LevelInfo, "flow closed", attrs...)
}

// logRejected writes the line of a connection that was not relayed.
func (l *flowLog) logRejected(f *FlowInfo, r *rejection) {
	attrs := l.beginLine(f.ID)
	if attrs == nil {
		return
	}
	l.log.LogAttrs(context.Background(), slog.LevelInfo, "flow refused", append(attrs,
		slog.String("listener", f.Listener), addressAttr("client", f.Source), addressAttr("target", f.Target),
		slog.String("host", f.Host), slog.String("reason", string(r.reason)),
		slog.Duration("duration", f.Age.Round(time.Microsecond)), slog.Any("err", r.err))...)
}

// directionAttrs describes a direction and the leg that it sends to.
func directionAttrs(name string, d *DirectionInfo, leg *datapath.Info) slog.Attr {
	attrs := append(make([]slog.Attr, 0, 12), slog.String("algorithm", d.Algorithm),
		slog.Int64("bytes", int64(d.Written)))
	if unwritten := d.Read - d.Written; unwritten > 0 {
		attrs = append(attrs, slog.Int64("undelivered", int64(unwritten)))
	}
	// A flow measures round trips itself. An unmanaged direction has those of its transport alone.
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

// addressAttr returns an attribute that is empty where the address is not known.
func addressAttr(key string, a netip.AddrPort) slog.Attr {
	if !a.IsValid() {
		return slog.String(key, "")
	}
	return slog.String(key, a.String())
}
