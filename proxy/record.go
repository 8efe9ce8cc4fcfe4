package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/takeover"
)

// recordVersion is that of what is written. A change that an older reader must not skip raises it.
const recordVersion = 1

// Bounds of a batch of records.
const (
	maxBatch       = takeover.MaxBatch / 2 // connections, of two descriptors each
	batchSize      = 60                    // connections that are written at most, because each waits for the whole batch
	maxBatchStored = 16 << 20              // bytes read and not written yet, beyond which no further connection is added
	maxStored      = 4 << 20               // of one direction, in bytes
)

// batchRecord is what one message of a takeover says of connections. Descriptors come apart: two for each connection,
// of the client leg and the server leg. Fields that a reader does not know are skipped.
type batchRecord struct {
	Version     int                `json:"version"`
	Connections []connectionRecord `json:"connections"`
}

// connectionRecord is a relayed connection of kernel sockets, as another process needs it to go on.
type connectionRecord struct {
	Listener string         `json:"listener"` // its name
	Source   netip.AddrPort `json:"source"`
	Target   netip.AddrPort `json:"target"` // where the client wanted to go; invalid: it named a host
	Host     string         `json:"host,omitempty"`
	Fixed    bool           `json:"fixed,omitempty"`
	Facts    policy.Facts   `json:"facts"`   // what the verdict was given on
	Verdict  policy.Verdict `json:"verdict"` // with the terms in force

	Age   time.Duration `json:"age"`   // since it was accepted
	Setup time.Duration `json:"setup"` // from accepted to relaying
	Idle  time.Duration `json:"idle"`  // since a byte last moved

	Client kernel.DetachedLeg `json:"client"`
	Server kernel.DetachedLeg `json:"server"`
	Down   directionRecord    `json:"down"`
	Up     directionRecord    `json:"up"`
}

// directionRecord is one direction of a connectionRecord.
type directionRecord struct {
	Read          int64        `json:"read"`    // bytes, since the connection began
	Written       int64        `json:"written"` // bytes
	Spliced       int64        `json:"spliced"` // bytes
	Retransmitted int64        `json:"retransmitted"`
	Stored        []byte       `json:"stored,omitempty"`   // read and not written yet
	Finished      bool         `json:"finished,omitempty"` // the source's end was passed on
	Managed       bool         `json:"managed,omitempty"`  // a flow was open
	Underway      int64        `json:"underway,omitempty"` // upper bound of the bytes underway where none was
	Window        flow.Dormant `json:"window,omitzero"`    // of the flow
}

// encodeBatch returns records as decodeBatch reads them.
func encodeBatch(records []connectionRecord) ([]byte, error) {
	text, err := json.Marshal(batchRecord{recordVersion, records})
	if err != nil {
		return nil, fmt.Errorf("proxy: describe connections: %w", err)
	}
	return text, nil
}

// decodeBatch reads the records that came with descriptors, and puts these into them.
func decodeBatch(text []byte, fds []int) ([]connectionRecord, error) {
	var b batchRecord
	if err := json.Unmarshal(text, &b); err != nil {
		return nil, fmt.Errorf("proxy: connections of another process: %w", err)
	}
	switch {
	case b.Version < 1 || b.Version > recordVersion:
		return nil, fmt.Errorf("proxy: connections of another process: their version is %d, not %d", b.Version,
			recordVersion)
	case len(fds) != 2*len(b.Connections) || len(b.Connections) > maxBatch:
		return nil, fmt.Errorf("proxy: connections of another process: %d come with %d descriptors",
			len(b.Connections), len(fds))
	}
	for i := range b.Connections {
		r := &b.Connections[i]
		if err := r.checkRecord(); err != nil {
			return nil, fmt.Errorf("proxy: connections of another process: %w", err)
		}
		r.Client.FD, r.Server.FD = fds[2*i], fds[2*i+1]
	}
	return b.Connections, nil
}

// checkRecord returns why no connection can be as the record says.
func (r *connectionRecord) checkRecord() error {
	switch {
	case !r.Client.Remote.IsValid() || !r.Server.Remote.IsValid() || !r.Source.IsValid():
		return errors.New("an address is missing")
	case r.Age < 0 || r.Setup < 0 || r.Setup > r.Age || r.Idle < 0:
		return errors.New("a time is below zero")
	case r.Down.Finished && r.Up.Finished:
		return errors.New("both directions are over")
	}
	for _, d := range []*directionRecord{&r.Down, &r.Up} {
		w := &d.Window
		if d.Written < 0 || d.Spliced < 0 || d.Retransmitted < 0 || d.Underway < 0 || len(d.Stored) > maxStored ||
			d.Finished && len(d.Stored) > 0 || d.Read-d.Written != int64(len(d.Stored)) {
			return fmt.Errorf("%d bytes were read, %d written, and %d are stored", d.Read, d.Written, len(d.Stored))
		}
		if w.Cwnd < 0 || w.BaseRTT < 0 || w.Rate < 0 || w.MSS < 0 {
			return errors.New("a window is below zero")
		}
	}
	return nil
}
