"""Reno, decided once per round trip: python3 reno.py [SOCKET]"""

import argparse

from penstock_agent import DEFAULT_SOCKET, Agent, Flow, Report


class Reno(Flow):
    # Below the threshold, which is slow start, the datapath opens the window by itself. Before the first sample of
    # the round trip, which reads as +infinity, it is taken for 1 s.
    programs = {
        "reno": """
            (def (Report (volatile acked 0) (volatile lost 0) (volatile timeout false) (cwnd 0) (now 0) (rtt 1000000))
                (threshold +infinity))
            (when true
                (:= Report.acked (+ Report.acked Ack.bytes_acked))
                (:= Report.lost (+ Report.lost Ack.lost_pkts_sample))
                (:= Report.timeout (|| Report.timeout Flow.was_timeout))
                (:= Report.now Ack.now)
                (:= Report.rtt (if (< Flow.rtt_sample_us +infinity) Flow.rtt_sample_us))
                (fallthrough))
            (when (< Cwnd threshold) (:= Cwnd (+ Cwnd Ack.bytes_acked)) (fallthrough))
            (when true (:= Report.cwnd Cwnd) (fallthrough))
            (when (|| Report.timeout (> Report.lost 0)) (report) (:= Micros 0))
            (when (> Micros Flow.rtt_sample_us) (report) (:= Micros 0))
        """
    }

    def on_create(self) -> None:
        self.cwnd, self.threshold = 0.0, float(2**32 - 1)  # bytes
        self.recovered = 0  # µs: until then losses are repaired for which the window was halved
        self.run("reno", Cwnd=self.initial_cwnd)

    def on_report(self, report: Report) -> None:
        if self.cwnd < self.threshold:
            self.cwnd = float(report.cwnd)
        before = self.cwnd
        if report.timeout:
            self.threshold, self.cwnd = max(self.cwnd / 2, 2.0 * self.mss), float(self.mss)
        elif report.lost and report.now < self.recovered:
            pass
        elif report.lost:
            self.threshold = self.cwnd = max(self.cwnd / 2, 2.0 * self.mss)
            self.recovered = report.now + 2 * report.rtt
        elif self.cwnd >= self.threshold:
            self.cwnd += self.mss * report.acked / self.cwnd
        if self.cwnd == before:
            self.update(threshold=int(self.threshold))  # an agent that says nothing is taken for a silent one
        else:
            self.update(Cwnd=int(self.cwnd), threshold=int(self.threshold))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Reno as an agent of the congestion control plane")
    arguments.add_argument("socket", nargs="?", default=DEFAULT_SOCKET, help="where it listens (default: %(default)s)")
    Agent(Reno, arguments.parse_args().socket).serve()
