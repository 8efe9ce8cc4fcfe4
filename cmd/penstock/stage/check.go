package stage

import (
	"errors"
	"fmt"
)

// maxHosts have room in the client's network beside the edge.
const maxHosts = 250

// Check tells what is wrong with the stage.
func (s Stage) Check() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	switch {
	case s.Duration <= 0:
		wrong("Duration is %s, but must be above 0", s.Duration)
	case s.Warmup < 0 || s.Warmup >= s.Duration:
		wrong("Warmup is %s, but must be shorter than the run of %s", s.Warmup, s.Duration)
	case s.Hints < 0:
		wrong("Hints are %s, but must not be negative; 0: never", s.Hints)
	case len(s.Actors) == 0:
		wrong("there is no actor")
	}
	for i, a := range s.Actors {
		if err := a.check(s); err != nil {
			wrong("actor %d, %q: %w", i, a.Name, err)
		}
	}
	for i, c := range s.Changes {
		switch {
		case c.At < 0 || c.At >= s.Duration:
			wrong("change %d is at %s, which is not in the run", i, c.At)
		case c.Edge != "" && s.Edge == "":
			wrong("change %d is for a proxy, but there is none: give Edge", i)
		case c.Delay < 0:
			wrong("change %d: Delay is %s, but must not be negative", i, c.Delay)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stage: %s: %w", s.Name, err)
	}
	return nil
}

func (a Actor) check(s Stage) error {
	switch {
	case a.Host < 0 || a.Host >= maxHosts:
		return fmt.Errorf("Host is %d, but must be from 0 to %d", a.Host, maxHosts-1)
	case a.Port < 0 || a.Port > 65535:
		return fmt.Errorf("Port is %d, but must be from 1 to 65535; 0: 80", a.Port)
	case a.Start < 0 || a.Start >= s.Duration:
		return fmt.Errorf("Start is %s, which is not in the run", a.Start)
	case a.Stop != 0 && a.Stop <= a.Start:
		return fmt.Errorf("Stop is %s, which is not after Start; 0: never", a.Stop)
	case a.Size < 0 || a.Every < 0 || a.Rate < 0 || a.Buffer < 0 || a.On < 0 || a.Off < 0:
		return errors.New("Size, Every, Rate, Buffer, On and Off must not be negative")
	case a.On == 0 && a.Off > 0:
		return errors.New("Off needs On")
	}
	switch a.Kind {
	case Bulk:
		return nil
	case Requests, Web:
		if a.Size == 0 {
			return errors.New("Size is missing: of what it requests")
		}
	case Video:
		if a.Rate == 0 || a.Every == 0 || a.Rate.BytesIn(a.Every) == 0 {
			return errors.New("Rate and Every are needed: the encoding's, and a chunk's length")
		}
		if a.Buffer > 0 && a.Buffer < a.Every {
			return fmt.Errorf("Buffer is %s, but must hold a chunk of %s; 0: %s", a.Buffer, a.Every, defaultBuffer)
		}
	case UDP:
		if a.Rate == 0 {
			return errors.New("Rate is missing")
		}
	default:
		return fmt.Errorf("Kind is %q, but must be one of %s, %s, %s, %s, %s", a.Kind, Bulk, Requests, Web, Video, UDP)
	}
	return nil
}

// port is the server's.
func (a Actor) port() uint16 {
	if a.Port == 0 {
		return 80
	}
	return uint16(a.Port)
}
