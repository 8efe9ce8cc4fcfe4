//! An agent on portus, of whatever version: it halves its window at a loss and adds to it otherwise.
use portus::ipc::Ipc;
use portus::lang::Scope;
use portus::{CongAlg, Datapath, DatapathInfo, DatapathTrait, Flow, Report};
use std::collections::HashMap;

const PROGRAM: &str = "
    (def (Report (volatile acked 0) (volatile lost 0) (volatile timeout false) (rtt 0)))
    (when true
        (:= Report.acked (+ Report.acked Ack.bytes_acked))
        (:= Report.lost (+ Report.lost Ack.lost_pkts_sample))
        (:= Report.timeout Flow.was_timeout)
        (:= Report.rtt Flow.rtt_sample_us)
        (fallthrough))
    (when (|| Report.timeout (> Report.lost 0)) (report) (:= Micros 0))
    (when (> Micros Report.rtt) (report) (:= Micros 0))";

#[derive(Clone)]
struct Halve;

struct Half<I: Ipc> {
    control: Datapath<I>,
    scope: Scope,
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
        h.insert("fold", PROGRAM.to_owned());
        h
    }

    fn new_flow(&self, mut control: Datapath<I>, info: DatapathInfo) -> Half<I> {
        let scope = control.set_program("fold", Some(&[("Cwnd", info.init_cwnd)])).expect("program");
        Half { control, scope, mss: info.mss, cwnd: info.init_cwnd }
    }
}

impl<I: Ipc> Flow for Half<I> {
    fn on_report(&mut self, _: u32, r: Report) {
        let field = |name| r.get_field(name, &self.scope).expect("field");
        if field("Report.lost") > 0 || field("Report.timeout") > 0 {
            self.cwnd = (self.cwnd / 2).max(4 * self.mss);
        } else {
            self.cwnd = self.cwnd.saturating_add(field("Report.acked") as u32 / 4);
        }
        self.control.update_field(&self.scope, &[("Cwnd", self.cwnd)]).expect("update");
    }
}

fn main() {
    #[cfg(logger)]
    let _ = portus::start!("unix", None, Halve);
    #[cfg(not(logger))]
    let _ = portus::start!("unix", Halve);
}
