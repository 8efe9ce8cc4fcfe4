// Package flow turns what a transport reports about its bytes into the events
// of a congestion-control algorithm, and the algorithm's limits into grants.
// Flows of one group share one algorithm instance and one window, as those of a
// macroflow do (RFC 3124).
//
// It does no I/O and reads no clock: time comes in with every call.
package flow
