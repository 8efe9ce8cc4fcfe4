// Package proxy splits TCP connections in two and moves the bytes of each
// direction as fast as its congestion controller grants. It decides nothing
// about rates: package policy gives each direction its terms, and package flow enforces them.
//
// Open puts a Server on top of kernel TCP; New takes the parts one by one, which tests use for virtual time.
//
//	client ──▶ Listener ──▶ connection: leg ◀─ direction down ── leg ──▶ server
//	                                        ── direction up ───▶
//	                                        each: Flow.Take before a write, Flow.Report after an acknowledgement
//
// Files call only files further down this list:
//
//	handover.go                   relayed connections that another process takes over
//	kernel.go                     a Server over kernel TCP, with agents and sockets that were handed over
//	server.go                     accepts, drains, reloads, sweeps; lists and counts connections
//	reload.go                     the plan of a reload: which listeners stay, open and go
//	flowlog.go, limitlog.go       lines of connections that are over; warnings about limits
//	connection.go                 one client from accept to close: its phases and all its state
//	direction.go                  one direction of it: grants, reads, writes, terms
//	receive.go                    bounds of what a leg takes in
//	settings.go                   what connections share; a configuration in force, and what it allows
//	listen_netstack.go            listeners with tunnels that end in this process; listen_none.go: a build without them
//	listener.go                   a listener as one configuration has it, and its counters
//	listen.go                     listeners of sockets, and of tunnels that the kernel ends
//	heldudp.go                    UDP that waits in the kernel for room in a window
//	trial.go                      connections of one host that are left to the kernel, to compare
//	limits.go                     limits of connections; the division of descriptors
//	record.go                     what another process needs of a connection
//	report.go                     what users see of connections, and totals of ended ones
//	loopguard.go                  destinations and connections that are the proxy itself
//	reason.go                     why connections end
//
// # A download
//
//  1. A Listener accepts the client leg on a loop (package eventloop), and greets it. Where that takes asking
//     the client (SOCKS5, HTTP, a PROXY header), the loop feeds what comes to a parser of package greeting.
//  2. policy.Decide returns a verdict: a refusal, or flow.Terms for each direction. The server is dialled on the loop
//     of the client, and then the client is answered in its own protocol. The kernel answers captured
//     clients before the proxy sees them, so that a failed dial becomes a RST there. Where a rule by server name may
//     still decide, the client's first bytes are read, and relayed once it has decided.
//  3. Two kernel legs are relayed by the loop of both, other legs by a goroutine for each direction. A direction
//     is left to the kernel while no more than an initial window is underway (RFC 6928). Before a write would make it
//     more, the relay asks the leg what it can enforce, opens a flow, and gives the leg's reports to it.
//     Terms with a limit of their own, and algorithms that need hints, are in force from the first byte.
//  4. The relay reads a piece from the server leg, and no more than the client's socket takes: a reader that stalls
//     leaves nothing in a pipe. It bounds what the server leg takes in: a megabyte once that much has been passed
//     on, and more only where the path from the server carries more in a round trip. Then it asks the flow for a
//     grant, unless the leg enforces the window, and waits for Wake if there is none. While it does not read, the
//     server's receive window closes. That is back-pressure without a queue here.
//  5. Granted bytes are written to the client leg. Small pieces are copied, a stream is spliced through a pipe.
//     The leg's reports of acknowledgements go to the flow, which divides the window and wakes the relay.
//
// # The end of a connection
//
// A FIN is passed on as a FIN, and a reset as a reset, behind the bytes that came before it. The kernel resets every
// socket when its process dies (SO_LINGER {1, 0}, which accepted sockets inherit from their listener), and Conn.Close
// takes that back. So a crash ends nothing in good order. Sockets keep urgent bytes in line (SO_OOBINLINE); a splice
// stops at an urgent mark, so the carrier copies what begins there. The mark itself ends here.
//
// # Loops and goroutines
//
// An idle connection between kernel sockets has no goroutine, stack or buffer: one task of the loop of both legs
// moves both directions without a lock. The same task greets the client before that, and reads the first bytes that
// show a server name. What runs on a loop must not wait. So the setup pool serves the clients of tunnels and dials
// through tunnels, and a goroutine waits for the last acknowledgements before a reset.
//
// direction.moveBytes serves loops and goroutines. While a kernel.Driver serves both legs, they return datapath.ErrWait
// instead of waiting, and the loop calls again after an event, a Wake or the close of a leg. Elsewhere (netstack,
// HTTP/3, a request with parsed content) the same calls wait, and moveBytes returns when all is over.
//
// Keep-alives of server legs and the bound of what a leg takes in are set late, because most connections end before
// they matter. Timeouts of silence have no timer of their own, which every byte would have to set: a sweep over all
// connections checks them.
//
// # Time and locks
//
// Flows and counters take their time from Parts.Clock. Timers of this package (drains, sweeps, deadlines) are the
// runtime's, which tests replace by those of testing/synctest.
//
// Locks are taken in this order: Server.reloading, Server.mu, totals.mu; connection.mu, receiveControl.mu, those of
// package flow. While another lock of this package is held, none is taken.
//
// # A reload
//
// Server.Reload checks the configuration, makes a reloadPlan, which opens and changes listeners and can be undone,
// and stores the new settings. New connections find these; a connection that is being made looks for them again once
// it is relayed; every running one is decided about again on the facts that it was let in by. No byte is lost:
// flow.Flow.Move gives a flow other terms while it sends.
package proxy
