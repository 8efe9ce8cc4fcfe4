// Package flow connects transports to congestion-control algorithms. It turns what a transport reports about its
// bytes into the events of an algorithm, and the algorithm's window into a limit for each flow.
// It does no I/O, reads no clock and starts no goroutine: time comes in with every call.
//
// # From a report to a limit
//
//	Report ──▶ sampler ──▶ window ──▶ division ──▶ Limit (Leg.Apply)
//	           ledger      Algorithm  allocator    or Grant (Flow.Take)
//
// A sampler, one for each flow, finds what is new in a report. A window, one for each group, tells its algorithm about
// it (OnLoss, then OnAck) and takes over the algorithm's control. A division shares the window among the members
// that are active. Each limit that has changed is pushed to its leg at once. A group holds the lock and begins
// all of this when a report, a request, a tick or a change of terms comes in. A Manager finds the group of a flow.
//
// Files call only files further down this list:
//
//	echo.go, numbering.go         EchoFlow: a flow for packets of other hosts' transports; answers without a number
//	probing.go                    when a host is asked whether it answers
//	manager.go                    groups by name, paths by host; opening, moving, closing; hints
//	flow.go, fairqueue.go         what a user holds: Flow, Receiving; FairQueue
//	group.go                      one lock; reports, requests, ticks, moves, descriptions
//	division.go, allocator.go     who is active, shares of the window, limits put into force
//	window.go                     the algorithm and its inputs; caps; idle memory
//	hints.go, passing.go          the newest hint, checked against what is delivered; what passes beside the group
//	member.go                     one flow as its group knows it; the path to its host
//	gate.go                       pacing, the relay's side of a limit, maximum rates
//	sampler.go, oneway.go         round trips, delivery rates, bytes in flight; the queue on the way back
//	timers.go, report.go          due times; the types that transports and policy use
//
// # Groups
//
// Flows with equal Terms.Group, Algorithm and Params form a group. They share one algorithm instance and one window
// (a macroflow, RFC 3124). A lone flow is a group with one member. By default a group is all that goes to one host.
//
// # What is counted, and why
//
// In flight are the bytes of the transport's pipe: outstanding − SACKed − lost + retransmitted. Where the relay keeps
// the window, bytes that the transport has not sent yet, and granted bytes that have not reached it, count too.
// Counting by cumulative acknowledgements would stall in each recovery and then release a burst of up to a window.
// Unsent bytes behind a closed receive window count against their own flow only, because they load no path.
// The algorithm sees at most its window in flight if only the members' floors keep more there. It cannot take
// that back, and one that waits for it to go (BBR's ProbeRTT) would wait forever.
//
// Round trips are the transport's raw samples where it has them, otherwise the ledger's, per chunk. They are never
// smoothed figures. The time that a chunk waited unsent in the socket is not part of its round trip.
// A chunk that may have been sent twice gives no sample (Karn). SACKed chunks behind a hole give samples.
//
// The queue on the way back is known where the transport shows the peer's timestamps (see oneWayEstimator).
// Without them the whole round trip counts as one.
//
// CwndLimited is false while the window is not what holds the flow back: bytes pile up below it, the peer's receive
// window is full, or all members that want to send have all that their terms allow. An algorithm that grew its window
// then would only store up a burst.
//
// A loss event lasts until all that had been sent when it began has arrived, however many round trips the holes take
// (RFC 6582). What one full queue drops is one event for all members, even if one of them learns of it late.
//
// ECN marks are congestion (RFC 3168) for every algorithm. Package cc answers them (Spec.Marks); this package counts
// them and lets them cut the window as losses do.
//
// # Sharing
//
// Each division gives every member its floor first: two segments, or what MinRate takes. Then it serves one Priority
// after another, the lowest first. Within a priority, guarantees get up to their Target by weighted max-min. The
// others share the rest by weighted max-min. Of what remains, guarantees get up to a tenth above their Target. Rates
// become windows by the smoothed round trip. Members use what another member leaves.
//
// Receivers acknowledge every second segment (RFC 9293 §3.8.6.3), so members that compete get whole pairs of segments.
//
// Among up to eight active members any change divides the window at once, which costs about as much as the report.
// Among more, it is divided at most once per millisecond and four times per round trip. A loss, a mark, or new members
// that are one in eight make it urgent. A member that was silent for a retransmission timeout is inactive and is in no
// division.
//
// A raised limit is used when the next acknowledgement arrives, unless Limit.Now is set. Members that all send
// whenever their window grows would send in bursts.
//
// # Paths
//
// A group has one path for each host. Paths may share a bottleneck, such as an uplink, at unlike distances, where
// equal windows would be unequal rates. The path of the first sample is the reference. Where the base round trip of
// another path differs by more than a fifth, its bytes count by the ratio of both round trips. The algorithm sees its
// samples as the reference's base plus their queueing delay.
//
// # Idle groups and memory
//
// A group with nothing in flight and nothing to send keeps its algorithm and window for 10 s, or three retransmission
// timeouts if those are longer. What starts then is paced over one round trip (RFC 7661 §4.4.3). After that time the
// algorithm is released. The window halves with each timeout, down to the initial one (RFC 2861). The next algorithm
// starts from it, with the base round trip of the path, and with the old window as ssthresh. A host that the group has
// not seen starts from nothing. A group without members is forgotten after five minutes.
//
// A send ledger has 32 to 512 chunks and is released once its flow is inactive. A Manager keeps at most 4096 groups
// without members, and 16 paths without members in each group. It keeps nothing of an Alone flow.
//
// # Moving a running flow
//
// Flow.Move changes a flow's terms while it sends. Weight, priority and maximum rate change in place. Another group,
// algorithm or set of parameters leads to another group:
//
//   - Bytes in flight move along, so the sums of both groups stay right. Round trips stay exact. Delivery rates are
//     measured from the move on.
//   - The leg gets its new limit at once. The members that stay share the whole of the old window.
//   - A new algorithm starts with the known round trips and with the flow's part of the old window
//     (cc.Config.InitialCwnd). That is at most its delivery rate × least round trip, or ten segments. A window that was
//     never used, or that stood in a queue, is no start. Members that arrive within one round trip add up their parts.
//   - The algorithm learns only about bytes that leave after the move, except for timeouts. Acknowledgements of an old,
//     larger window would open the new one by as much.
//
// # Receiving
//
// The window that a receiver advertises bounds what an unmodified sender may have in flight, so it can be a congestion
// window (RFC 9840 §4). A Receiving flow takes in Arrivals: what has come counts as acknowledged, what came during the
// last round trip counts as in flight, and a hole is a loss. It never shares a group with flows that send.
//
// # Maximum rates
//
// Terms.MaxRate bounds all flows of a group name together, whatever their algorithms are. One leaky bucket
// (rateLimit) lets every byte pass before it reaches a transport, in the order in which flows ask. Where all members
// of a group have the same maximum, their limits keep to it by class and weight. The bucket, one hundredth wider, then
// only bounds the sum. Terms.ConnectionRate bounds one flow by its own pacer. Linux sends the first ten segments of a
// connection whatever the pacing rate is, so Take must be asked for those (Flow.NeedsGrants).
//
// With Terms.Shared other edges have flows of the same group. Manager.SetSharedRate then says which part of the rate
// may be used here.
//
// # Packets of other transports
//
// UDP and ICMP to a host are one member of its group (EchoFlow), with as much weight as they have busy flows. A
// FairQueue holds what has no room. Something else than the packets' own transport acknowledges them (Source). Answers
// to echo requests do: all that left before a request has arrived when its answer comes. QUIC's acknowledgement of a
// packet's datagram is such an answer. Where none comes, the member follows the others: what left before a byte of
// theirs has arrived with that byte. A follower is paced to its part of the window. Where no other member wants the
// window, nothing shows what the path carries, and a follower's packets pass.
//
// # Time and locks
//
// A group, a flow that waits for its pacer, and a maximum rate each have one timer in a heap. Manager.Tick runs what
// is due in one shard and returns when it wants the next call; Manager.Arm asks for an earlier one. Groups are spread
// over Manager.Shards by a hash of their names.
//
// Locks are taken in this order: manager, group (Move holds two), maximum rate, timers. The table beside type group
// lists what each one guards and what runs under it.
package flow
