//! An agent on portus, of whatever version. Flows differ in their programs: one with all that
//! the language has, one that reports each acknowledgement, one that raises the window by itself
//! and is paced, and one that changes its program with each report. All halve the window at a
//! loss and add to it otherwise.
use portus::ipc::Ipc;
use portus::lang::Scope;
use portus::{CongAlg, Datapath, DatapathInfo, DatapathTrait, Flow, Report};
use std::collections::HashMap;

const MANY: &str = "
    (def (Report
            (volatile acked 0)
            (volatile lost 0)
            (volatile timeout false)
            (volatile minrtt +infinity)
            (volatile maxrate 0)
            (smooth 0)
            (seq 0)
            (volatile ecn 0)
            (volatile misordered 0)
            (inflight 0)
            (pending 0)
            (out 0))
        (gain 12)
        (volatile seen 0)
        (interval 10000))
    # first what is folded
    (when true
        (bind Report.acked (add Report.acked Ack.bytes_acked))
        (:= Report.lost (+ Report.lost Ack.lost_pkts_sample))
        (:= Report.timeout (|| Report.timeout Flow.was_timeout))
        (:= Report.minrtt (min Report.minrtt Flow.rtt_sample_us))
        (:= Report.maxrate (max Report.maxrate Flow.rate_incoming))
        (:= Report.smooth (ewma 8 Flow.rate_outgoing))
        (:= Report.seq (wrapped_max Report.seq Ack.now))
        (:= Report.ecn (+ Report.ecn (+ Ack.ecn_bytes Ack.ecn_packets)))
        (:= Report.misordered (+ Report.misordered (+ Ack.bytes_misordered Ack.packets_misordered)))
        (:= Report.inflight (* Flow.packets_in_flight 1500))
        (:= Report.pending (+ Flow.bytes_in_flight Flow.bytes_pending))
        (:= Report.out (/ (mul Flow.rate_outgoing gain) 10))
        (:= seen (+ seen Ack.packets_acked))
        (:= many (> seen 4))
        (:= Report.out (if many Report.out))
        (:= Report.out (!if many Report.out))
        (fallthrough))
    (when (&& (> Micros interval) (== Report.lost 0)) (report) (:= Micros 0))
    (when (|| Report.timeout (> Report.lost 0)) (report) (:= Micros 0))";

const EACH: &str = "
    (def (Report (volatile acked 0) (volatile lost 0)))
    (when true
        (:= Report.acked (+ Report.acked Ack.bytes_acked))
        (:= Report.lost (+ Report.lost Ack.lost_pkts_sample))
        (report))";

const PACED: &str = "
    (def (Report (volatile acked 0) (volatile lost 0) (volatile rate 0)))
    (when true
        (:= Report.acked (+ Report.acked Ack.bytes_acked))
        (:= Report.lost (+ Report.lost Ack.lost_pkts_sample))
        (:= Report.rate (max Report.rate Flow.rate_incoming))
        (fallthrough))
    (when (> Micros Flow.rtt_sample_us)
        (:= Cwnd (+ Cwnd (/ Report.acked 4)))
        (report)
        (:= Micros 0))";

const FIRST: [&str; 4] = ["many", "each", "paced", "each"];

#[derive(Clone)]
struct Halve;

struct Half<I: Ipc> {
    control: Datapath<I>,
    scope: Scope,
    kind: usize,
    reports: u32,
    mss: u32,
    cwnd: u32,
}

impl<I: Ipc> CongAlg<I> for Halve {
    type Flow = Half<I>;

    fn name() -> &'static str {
        "halve"
    }

    fn datapath_programs(&self) -> HashMap<&'static str, String> {
        let mut h = HashMap::new();
        h.insert("many", MANY.to_owned());
        h.insert("each", EACH.to_owned());
        h.insert("paced", PACED.to_owned());
        h
    }

    fn new_flow(&self, mut control: Datapath<I>, info: DatapathInfo) -> Half<I> {
        let kind = info.sock_id as usize % FIRST.len();
        let mut set = vec![("Cwnd", info.init_cwnd)];
        if kind == 0 {
            set.push(("interval", 5000));
        }
        let scope = control.set_program(FIRST[kind], Some(&set)).expect("program");
        Half { control, scope, kind, reports: 0, mss: info.mss, cwnd: info.init_cwnd }
    }
}

impl<I: Ipc> Half<I> {
    /// twice what arrives, in bytes per second
    fn pace(&self, r: &Report, field: &str) -> u32 {
        2 * (r.get_field(field, &self.scope).expect("rate") as u32).max(100_000)
    }
}

impl<I: Ipc> Flow for Half<I> {
    fn on_report(&mut self, _: u32, r: Report) {
        let lost = match r.get_field("Report.lost", &self.scope) {
            Ok(lost) => lost,
            Err(_) => return, // of the program before
        };
        let acked = r.get_field("Report.acked", &self.scope).expect("acked") as u32;
        self.reports += 1;
        if lost > 0 {
            self.cwnd = (self.cwnd / 2).max(10 * self.mss);
        } else {
            self.cwnd = self.cwnd.saturating_add(acked / 4);
        }
        let mut set = vec![("Cwnd", self.cwnd)];
        match self.kind {
            0 => set.extend(vec![("Rate", self.pace(&r, "Report.maxrate")), ("gain", 10 + self.reports % 5)]),
            2 => set = vec![("Rate", self.pace(&r, "Report.rate"))],
            3 => {
                let next = if self.reports % 2 == 0 { "each" } else { "paced" };
                self.scope = self.control.set_program(next, Some(&set)).expect("program");
                return;
            }
            _ => {}
        }
        self.control.update_field(&self.scope, &set).expect("update");
    }
}

fn main() {
    #[cfg(logger)]
    let _ = portus::start!("unix", None, Halve);
    #[cfg(not(logger))]
    let _ = portus::start!("unix", Halve);
}
