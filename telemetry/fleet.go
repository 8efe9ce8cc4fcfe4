package telemetry

import "net/http"

// FleetCounts is the state of the fleet that the proxy is an edge of. Messages are counted since the start.
type FleetCounts struct {
	Live, Silent   int  // members; this edge is live
	Granted, Parts int  // shared rates in use here: with a grant, or with one Nth because there is no grant
	Decides        bool // enough edges are heard to divide shared rates
	Sent, Received uint64
	Refused        uint64 // as malformed, or of another version
	Remembered     uint64 // hosts with a window that a draining edge has sent
}

// Families of a fleet.
var (
	fleetMembers = newGauge("fleet_members", "Edges of the fleet, this one included.", "state")
	fleetDecides = newGauge("fleet_decides",
		"Whether enough edges are heard to divide shared rates: 0 while each has one Nth.")
	fleetLimits   = newGauge("fleet_shared_limits", "Shared maximum rates in use at this edge.", "by")
	fleetMessages = newCounter("fleet_messages_total", "Messages between this edge and others.", "direction")
	fleetRefused  = newCounter("fleet_messages_refused_total",
		"Messages of other edges that are of another version, or malformed.")
	fleetHosts = newCounter("fleet_hosts_remembered_total",
		"Hosts that an edge which drains has told this one about.")
)

// writeFleet writes the series of a fleet.
func (s sink) writeFleet(c FleetCounts) {
	s.putSample(fleetMembers, float64(c.Live), "live")
	s.putSample(fleetMembers, float64(c.Silent), "silent")
	s.putSample(fleetDecides, oneIf(c.Decides))
	s.putSample(fleetLimits, float64(c.Granted), "grant")
	s.putSample(fleetLimits, float64(c.Parts), "part")
	s.putSample(fleetMessages, float64(c.Sent), "sent")
	s.putSample(fleetMessages, float64(c.Received), "received")
	s.putSample(fleetRefused, float64(c.Refused))
	s.putSample(fleetHosts, float64(c.Remembered))
}

// serveFleet answers with what the proxy knows of its fleet.
func (p Pages) serveFleet(w http.ResponseWriter, _ *http.Request) {
	if p.Fleet == nil {
		http.Error(w, "the proxy is in no fleet; its configuration needs fleet: {listen, key_file, join}",
			http.StatusNotFound)
		return
	}
	writeJSON(w, p.Fleet())
}
