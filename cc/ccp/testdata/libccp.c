// Runs programs under libccp, the authors' own datapath, in virtual time. It reads cases from
// standard input and writes what came of each run. All numbers are 64 bits of this machine.
//
//	case: length of the messages, the messages one after the other, number of runs
//	run: time in µs, cwnd in bytes, rate in bytes/s, and the primitives by their indexes
//	answer: 1 if the run ended in an error, cwnd and rate that it set (0: none), length of
//	        the report (0: none), the report
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ccp.h"

static u64 clock_us, cwnd, rate, report_len;
static char report[2048];

static void set_cwnd(struct ccp_connection *c, u32 v) { (void)c; cwnd = v; }
static void set_rate(struct ccp_connection *c, u32 v) { (void)c; rate = v; }
static u64 now(void) { return clock_us; }
static u64 since(u64 then) { return clock_us - then; }
static u64 after(u64 us) { return clock_us + us; }
static void say(struct ccp_datapath *d, enum ccp_log_level l, const char *m, int n) { (void)d; (void)l; (void)m; (void)n; }

static int transmit(struct ccp_datapath *d, char *m, int n) {
	(void)d;
	if (m[0] == 1 && n <= (int)sizeof report) { // a report
		memcpy(report, m, n);
		report_len = n;
	}
	return 0;
}

static u64 get(void) {
	u64 v;
	if (fread(&v, sizeof v, 1, stdin) != 1)
		exit(0);
	return v;
}

static void put(u64 v) { fwrite(&v, sizeof v, 1, stdout); }

int main(void) {
	static char messages[1 << 16];
	for (;;) {
		struct ccp_connection flows[2];
		struct ccp_datapath d = {
			.set_cwnd = set_cwnd, .set_rate_abs = set_rate, .now = now, .since_usecs = since, .after_usecs = after,
			.send_msg = transmit, .log = say, .max_connections = 2, .ccp_active_connections = flows, .max_programs = 10,
			.fto_us = 1000,
		};
		struct ccp_datapath_info info = {.init_cwnd = 14480, .mss = 1448};
		u64 len = get(), runs;
		int at = 0;
		memset(flows, 0, sizeof flows);
		clock_us = 0;
		if (len > sizeof messages || fread(messages, 1, len, stdin) != len || ccp_init(&d, 1) < 0)
			return 1;
		struct ccp_connection *c = ccp_connection_start(&d, &d, &info);
		if (!c)
			return 1;
		while (at < (int)len) {
			unsigned short n;
			memcpy(&n, messages + at + 2, sizeof n);
			if (ccp_read_msg(&d, messages + at, n) < 0)
				return 2;
			at += n;
		}
		for (runs = get(); runs; runs--) {
			struct ccp_primitives *p = &c->prims;
			clock_us = get();
			p->snd_cwnd = get(), p->snd_rate = get();
			p->bytes_acked = get(), p->bytes_misordered = get(), p->ecn_bytes = get(), p->ecn_packets = get();
			p->lost_pkts_sample = get(), get(), p->packets_acked = get(), p->packets_misordered = get();
			p->bytes_in_flight = get(), p->bytes_pending = get(), p->packets_in_flight = get();
			p->rate_incoming = get(), p->rate_outgoing = get(), p->rtt_sample_us = get(), p->was_timeout = get();
			cwnd = rate = report_len = 0;
			put(ccp_invoke(c) < 0);
			put(cwnd), put(rate), put(report_len);
			fwrite(report, 1, report_len, stdout);
		}
		fflush(stdout);
		ccp_connection_free(&d, c->index);
		ccp_free(&d);
	}
}
