package telemetry

// HintSource is an interface of this machine that tells hints.
type HintSource struct {
	Interface string
	Readings  uint64
	Errors    uint64
	Up        bool // the last reading worked
}

func (s sink) hintSource(h HintSource) {
	s.putSample(hintReadings, float64(h.Readings), h.Interface)
	s.putSample(hintErrors, float64(h.Errors), h.Interface)
	s.putSample(hintSourceUp, oneIf(h.Up), h.Interface)
}
