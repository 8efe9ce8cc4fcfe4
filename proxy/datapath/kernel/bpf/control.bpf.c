//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
//
// A congestion control that decides nothing by itself: it enforces the window and
// the pacing rate that a process writes into a shared cell, and writes there what
// each acknowledgement brought. Loss detection, SACK, retransmission and timeouts
// stay the kernel's.
//
// A process that no longer answers must not leave an uncontrolled sender behind. A
// socket whose acknowledgements go unanswered for a few round trips falls back to
// Reno (RFC 5681), from the window it has, until it is answered again. The pacing
// rate applied last stays its ceiling meanwhile, since it may be what an operator
// allows. A process that is only busy answers in the end; one that is dead or
// stopped writes no more, so all that is left to send at that rate is what it wrote
// before.

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define NSEC_PER_USEC 1000ULL
#define NSEC_PER_MSEC 1000000ULL

// How long acknowledgements may go unanswered: four round trips, but not less
// than a busy machine may keep a process waiting, nor more than a queue that
// nobody controls should have to grow.
#define SILENCE_RTTS 4
#define SILENCE_LEAST (100 * NSEC_PER_MSEC)
#define SILENCE_MOST (2000 * NSEC_PER_MSEC)

// Kernel constants (include/net/tcp.h, include/net/sock.h).
#define TCP_CONG_NON_RESTRICTED 1
#define SK_PACING_NEEDED 1
#define MIN_CWND 2

enum tcp_ca_event { CA_EVENT_TX_START };
enum { TCP_CA_OPEN, TCP_CA_DISORDER, TCP_CA_CWR, TCP_CA_RECOVERY, TCP_CA_LOSS };

// The kernel's structures, as far as they are used; offsets are found when the
// program is loaded.
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sock {
	unsigned long sk_pacing_rate; // bytes per second
	unsigned long sk_max_pacing_rate;
	__u32 sk_pacing_status;
};

struct inet_sock {
	struct sock sk;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
	__u64 icsk_ca_priv[13];
};

struct tcp_options_received {
	__u32 rcv_tsval;
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	struct tcp_options_received rx_opt;
	__u64 bytes_acked;
	__u32 snd_una, snd_nxt, write_seq;
	__u32 packets_out, sacked_out, lost_out, retrans_out;
	__u32 delivered, delivered_ce, lost;
	__u32 srtt_us; // times 8
	__u32 mss_cache, snd_wnd;
	__u32 snd_cwnd, snd_cwnd_clamp, snd_ssthresh, prior_cwnd;
};

struct rate_sample {
	long rtt_us; // -1: no sample
	__u32 acked_sacked;
	__u32 last_end_seq;
};

struct tcp_congestion_ops {
	__u32 (*ssthresh)(struct sock *sk);
	void (*set_state)(struct sock *sk, __u8 state);
	__u32 (*min_tso_segs)(struct sock *sk);
	void (*cong_control)(struct sock *sk, __u32 ack, int flag, const struct rate_sample *rs);
	__u32 (*undo_cwnd)(struct sock *sk);
	char name[16];
	__u32 flags;
	void (*init)(struct sock *sk);
};

#pragma clang attribute pop

extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;

// applied is what the process says: a limit, whenever it changes, and the answer to
// the socket's events, once the limit that follows from them is written. Fields are
// written one by one, so a socket may read some old and some new ones; each is
// right or a moment old. The answer is written last and read first, so a socket
// never takes an old limit for an answer.
struct applied {
	__u32 generation; // the binding it is for; a socket of any other has no process
	__u32 cwnd;       // bytes; 0: none applied yet
	__u64 rate;       // bytes per second; 0: not paced
	__u64 answers;    // `at` of the newest event that the limit takes into account
	__u32 timeouts;   // timeouts that it takes into account
	__u32 marked;     // packets with ECN marks that it takes into account
	__u32 unused[8];
};

// seen is what the socket says: counters and gauges, so that nothing is lost when
// the process reads late. Stream offsets count from snd_una at the time of binding.
struct seen {
	__u32 sequence; // odd while the rest is being written
	__u32 generation;
	__u64 at;    // CLOCK_MONOTONIC ns of the newest event
	__u64 acked; // offset of snd_una
	__u64 newest; // highest offset known to have arrived, holes below it notwithstanding
	__u64 sent;  // offset of snd_nxt
	__u64 end;   // offset of write_seq
	__u32 rtt_us, srtt_us; // newest raw sample, 0: none yet; smoothed
	__u32 packets_out, sacked_out, lost_out, retrans_out;
	__u32 delivered, marked, lost, timeouts; // packets, packets, packets, events
	__u32 acks;
	__u32 mss, snd_wnd, cwnd; // bytes, bytes, packets
	__u32 fallbacks;   // how often the socket fell back to Reno
	__u32 in_fallback; // 1: it runs Reno now
	__u32 samples;     // how many there were of rtt_us
	__u32 tsval;       // timestamp of the newest segment that came (RFC 7323); 0: there is none
	__u32 unused[2];
};

// A cell is three cache lines; only the first is written by the process.
struct cell {
	struct applied applied;
	struct seen seen;
};

struct binding {
	__u32 cell, generation;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1); // set when loaded
	__type(key, __u32);
	__type(value, struct cell);
} cells SEC(".maps");

// news has a bit for each cell in which there is something new, so that the process
// need not read all of them. The process clears them.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1); // set when loaded
	__type(key, __u32);
	__type(value, __u64);
} news SEC(".maps");

// bindings maps a socket to its cell. The process writes it, with the descriptor as
// the key, before it selects this congestion control.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct binding);
} bindings SEC(".maps");

// state is what a socket keeps for itself, in the kernel's room for congestion
// controls (104 bytes).
struct state {
	__u32 cell, generation; // cell counts from 1; 0: bound to none
	__u64 base;             // bytes_acked when bound
	__u64 newest;
	__u64 at;      // the newest acknowledgement or timeout
	__u64 since;   // the oldest one that is not answered
	__u64 answers; // applied.answers when last read
	__u64 rate;    // applied.rate when last read; it outlives the cell
	__u32 delivered, marked, lost; // when bound
	__u32 acks, timeouts, rtt_us, samples, fallbacks;
	__u8 ca_state, in_fallback;
};
_Static_assert(sizeof(struct state) <= 13 * 8, "no room in icsk_ca_priv");
_Static_assert(sizeof(struct applied) == 64 && sizeof(struct seen) == 128, "cells are whole cache lines");

static __always_inline struct tcp_sock *tcp_sk(struct sock *sk) { return (struct tcp_sock *)sk; }

static __always_inline struct state *state_of(struct sock *sk)
{
	return (struct state *)((struct inet_connection_sock *)sk)->icsk_ca_priv;
}

// cell_of returns the socket's cell; NULL: no process is bound to it any more.
static __always_inline struct cell *cell_of(struct state *s)
{
	__u32 i = s->cell - 1;
	struct cell *c = bpf_map_lookup_elem(&cells, &i);

	return c && c->applied.generation == s->generation ? c : NULL;
}

// after compares sequence numbers.
static __always_inline bool after(__u32 a, __u32 b) { return (__s32)(a - b) > 0; }

// bump steps the sequence number. It orders the stores before and after it, for
// which its result must be used.
static __always_inline void bump(__u32 *sequence)
{
	__u32 before = __sync_fetch_and_add(sequence, 1);

	asm volatile("" ::"r"(before) : "memory");
}

// mark makes news of the socket's cell.
static __always_inline void mark(struct state *s)
{
	__u32 cell = s->cell - 1, word = cell / 64;
	__u64 bit = 1ULL << (cell % 64), *bits = bpf_map_lookup_elem(&news, &word);

	if (bits && !(*bits & bit))
		__sync_fetch_and_or(bits, bit);
}

// publish writes the socket's state, as of an event at now, into its cell.
static __always_inline void publish(struct tcp_sock *tp, struct state *s, struct cell *c, __u64 now)
{
	__u64 acked = tp->bytes_acked - s->base;
	__u32 una = tp->snd_una;
	struct seen *to = &c->seen;

	bump(&to->sequence);
	to->generation = s->generation;
	to->at = now;
	to->acked = acked;
	to->newest = s->newest;
	to->sent = acked + (tp->snd_nxt - una);
	to->end = acked + (tp->write_seq - una);
	to->rtt_us = s->rtt_us;
	to->srtt_us = tp->srtt_us >> 3;
	to->packets_out = tp->packets_out;
	to->sacked_out = tp->sacked_out;
	to->lost_out = tp->lost_out;
	to->retrans_out = tp->retrans_out;
	to->delivered = tp->delivered - s->delivered;
	to->marked = tp->delivered_ce - s->marked;
	to->lost = tp->lost - s->lost;
	to->timeouts = s->timeouts;
	to->acks = s->acks;
	to->mss = tp->mss_cache;
	to->snd_wnd = tp->snd_wnd;
	to->cwnd = tp->snd_cwnd;
	to->fallbacks = s->fallbacks;
	to->in_fallback = s->in_fallback;
	to->samples = s->samples;
	to->tsval = bpf_core_field_exists(tp->rx_opt.rcv_tsval) ? tp->rx_opt.rcv_tsval : 0;
	bump(&to->sequence);
	mark(s);
}

// enforce puts the applied limit into force. After a timeout the kernel's window of
// one packet may grow up to that, as in slow start, until the process has answered
// the timeout. Until it has answered an ECN mark, the window is no more than the
// half that the kernel cuts to once per round trip.
static __always_inline void enforce(struct sock *sk, struct state *s, struct cell *c, __u32 acked)
{
	struct tcp_sock *tp = tcp_sk(sk);
	volatile struct applied *applied = &c->applied;
	bool timeout = applied->timeouts != s->timeouts;
	bool marked = applied->marked != tp->delivered_ce - s->marked;
	__u32 bytes = applied->cwnd, mss = tp->mss_cache, cwnd;
	__u64 rate = applied->rate;

	if (!bytes || !mss)
		return;
	cwnd = bytes / mss;
	if (cwnd < 1)
		cwnd = 1;
	if (cwnd > tp->snd_cwnd_clamp)
		cwnd = tp->snd_cwnd_clamp;
	if (timeout && cwnd > tp->snd_cwnd + acked)
		cwnd = tp->snd_cwnd + acked;
	if (marked && cwnd > tp->snd_ssthresh)
		cwnd = tp->snd_ssthresh;
	tp->snd_cwnd = cwnd;
	s->rate = rate;
	sk->sk_pacing_rate = rate ? rate : ~0UL;
}

// reno is for a socket in fallback, no faster than the rate applied last. In
// recovery the kernel leaves the window to a control that has cong_control: it is
// cut at once.
static __always_inline void reno(struct sock *sk, struct state *s, __u32 ack, __u32 acked)
{
	struct tcp_sock *tp = tcp_sk(sk);
	__u64 rate;

	if (s->ca_state == TCP_CA_CWR || s->ca_state == TCP_CA_RECOVERY) {
		if (tp->snd_cwnd > tp->snd_ssthresh)
			tp->snd_cwnd = tp->snd_ssthresh;
	} else if (acked) {
		tcp_reno_cong_avoid(sk, ack, acked);
	}
	// Twice the window per round trip in slow start, 1.2 times afterwards, as the
	// kernel paces its own. 8 undoes the scale of srtt_us.
	rate = (__u64)tp->mss_cache * tp->snd_cwnd * 8 * 10000;
	rate *= tp->snd_cwnd < tp->snd_ssthresh / 2 ? 200 : 120;
	rate = tp->srtt_us ? rate / tp->srtt_us : ~0UL;
	if (rate > sk->sk_max_pacing_rate)
		rate = sk->sk_max_pacing_rate;
	if (s->rate && rate > s->rate)
		rate = s->rate;
	sk->sk_pacing_rate = rate;
}

static __always_inline void fall_back(struct tcp_sock *tp, struct state *s)
{
	s->in_fallback = 1;
	s->fallbacks++;
	tp->snd_ssthresh = tp->snd_cwnd > MIN_CWND ? tp->snd_cwnd : MIN_CWND;
}

// note_answer notes whether the process has answered since the last call.
static __always_inline void note_answer(struct state *s, struct cell *c)
{
	__u64 answers = *(volatile __u64 *)&c->applied.answers;

	if (answers == s->answers)
		return;
	s->answers = answers;
	s->since = bpf_ktime_get_ns();
}

// note_event is for an event at now, before it becomes the newest one.
static __always_inline void note_event(struct state *s, struct cell *c, __u64 now)
{
	note_answer(s, c);
	if (s->answers == s->at)
		s->since = now; // this is the first one to answer
}

// answered tells whether the process keeps up with the acknowledgements; this
// one came at now.
static __always_inline bool answered(struct tcp_sock *tp, struct state *s, struct cell *c, __u64 now)
{
	__u64 patience = tp->srtt_us / 8 * NSEC_PER_USEC * SILENCE_RTTS;

	note_event(s, c, now);
	if (patience < SILENCE_LEAST)
		patience = SILENCE_LEAST;
	if (patience > SILENCE_MOST)
		patience = SILENCE_MOST;
	return (__s64)(now - s->since) <= (__s64)patience;
}

SEC("struct_ops")
void BPF_PROG(penstock_init, struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);
	struct state *s = state_of(sk);
	struct binding *b = bpf_sk_storage_get(&bindings, sk, 0, 0);
	__u64 now = bpf_ktime_get_ns();
	struct cell *c;

	__builtin_memset(s, 0, sizeof(*s));
	sk->sk_pacing_status = SK_PACING_NEEDED; // without it only an fq queue paces
	s->base = tp->bytes_acked;
	s->delivered = tp->delivered;
	s->marked = tp->delivered_ce;
	s->lost = tp->lost;
	s->at = s->since = now;
	if (b) {
		s->cell = b->cell + 1;
		s->generation = b->generation;
	}
	c = cell_of(s);
	if (c)
		publish(tp, s, c, now);
	else
		fall_back(tp, s);
}

SEC("struct_ops")
void BPF_PROG(penstock_cong_control, struct sock *sk, __u32 ack, int flag, const struct rate_sample *rs)
{
	struct tcp_sock *tp = tcp_sk(sk);
	struct state *s = state_of(sk);
	struct cell *c = cell_of(s);
	__u64 now = bpf_ktime_get_ns(), newest;

	if (!c) {
		if (!s->in_fallback)
			fall_back(tp, s);
		reno(sk, s, ack, rs->acked_sacked);
		return;
	}
	if (answered(tp, s, c, now)) {
		s->in_fallback = 0;
		enforce(sk, s, c, rs->acked_sacked);
	} else {
		if (!s->in_fallback)
			fall_back(tp, s);
		s->rate = c->applied.rate;
		reno(sk, s, ack, rs->acked_sacked);
	}

	s->at = now;
	s->acks++;
	if (rs->rtt_us > 0) {
		s->rtt_us = rs->rtt_us;
		s->samples++;
	}
	newest = tp->bytes_acked - s->base;
	// Without SACK it may be the end of a packet of which a part has arrived, and 0
	// stands for none.
	if (rs->acked_sacked && tp->sacked_out && after(rs->last_end_seq, tp->snd_una) &&
	    !after(rs->last_end_seq, tp->snd_nxt))
		newest += rs->last_end_seq - tp->snd_una;
	if (newest > s->newest)
		s->newest = newest;
	publish(tp, s, c, now);
}

// publish_window notes a receive window that the peer has changed without
// acknowledging anything, for which the kernel calls no control.
static __always_inline void publish_window(struct tcp_sock *tp, struct state *s, struct cell *c)
{
	if (c->seen.snd_wnd == tp->snd_wnd)
		return;
	bump(&c->seen.sequence);
	c->seen.snd_wnd = tp->snd_wnd;
	bump(&c->seen.sequence);
	mark(s);
}

// The kernel calls it before it sends anything, so a limit that was applied while
// the connection was idle, or between acknowledgements, is in force for what is
// written next. setsockopt(TCP_NODELAY) has the kernel try to send what waits. One
// packet at a time keeps paced packets evenly apart; at higher rates the kernel
// makes bursts of a millisecond anyway.
SEC("struct_ops")
__u32 BPF_PROG(penstock_min_tso_segs, struct sock *sk)
{
	struct state *s = state_of(sk);
	struct cell *c = cell_of(s);

	if (c) {
		note_answer(s, c);
		if (s->answers == s->at)
			s->in_fallback = 0;
		if (!s->in_fallback)
			enforce(sk, s, c, 0);
		publish_window(tcp_sk(sk), s, c);
	}
	return 1;
}

SEC("struct_ops")
void BPF_PROG(penstock_set_state, struct sock *sk, __u8 new_state)
{
	struct tcp_sock *tp = tcp_sk(sk);
	struct state *s = state_of(sk);
	struct cell *c;

	s->ca_state = new_state;
	if (new_state != TCP_CA_LOSS)
		return;
	// A smaller MTU leads here as well; only a timeout sets the window to what
	// is in flight and one.
	if (tp->snd_cwnd + tp->sacked_out + tp->lost_out != tp->packets_out + tp->retrans_out + 1)
		return;
	s->timeouts++;
	c = cell_of(s);
	if (c) {
		__u64 now = bpf_ktime_get_ns();

		note_event(s, c, now);
		s->at = now;
		publish(tp, s, c, now);
	}
}

SEC("struct_ops")
__u32 BPF_PROG(penstock_ssthresh, struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);

	return tp->snd_cwnd / 2 > MIN_CWND ? tp->snd_cwnd / 2 : MIN_CWND;
}

SEC("struct_ops")
__u32 BPF_PROG(penstock_undo_cwnd, struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);

	if (!state_of(sk)->in_fallback || tp->snd_cwnd > tp->prior_cwnd)
		return tp->snd_cwnd;
	return tp->prior_cwnd;
}

SEC(".struct_ops.link")
struct tcp_congestion_ops penstock = {
	.init = (void *)penstock_init,
	.cong_control = (void *)penstock_cong_control,
	.min_tso_segs = (void *)penstock_min_tso_segs,
	.set_state = (void *)penstock_set_state,
	.ssthresh = (void *)penstock_ssthresh,
	.undo_cwnd = (void *)penstock_undo_cwnd,
	.flags = TCP_CONG_NON_RESTRICTED,
	.name = "penstock", // with the process's own suffix when loaded
};

char _license[] SEC("license") = "GPL";
