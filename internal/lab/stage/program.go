package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/traffic"
	"github.com/penstock-net/penstock/internal/netlab"
)

// HostVariable of a program's environment is the address of the machine's own servers.
const HostVariable = "PENSTOCK_LAB_HOST"

// tellEvery is the period of Program.Tell, and the time that its figures are of.
const tellEvery = time.Second

// Program is a command that runs behind the last hop in place of actors. It reaches the world, and the machine's own
// servers, through the last hop and the edge.
type Program struct {
	Args []string  // the program and its arguments
	Pcap io.Writer // takes the packets that pass the host's device; nil: they are not recorded
	// Ready is called before the program starts, with the addresses of the machine's own servers.
	Ready func(host netlab.Addrs)
	// Tell is called once a second with the figures of that second.
	Tell func(elapsed time.Duration, second netlab.Report)
}

// RunProgram runs a program as a stage's only actor, in real time. The schedule of the last hop begins with the
// program. The stage that it returns is s with the program's duration and main direction, and code is the program's
// exit code.
func RunProgram(ctx context.Context, env Env, s Stage, p Program) (code int, played Stage, rec Record, err error) {
	if err := s.kernelHas(); err != nil {
		return 0, s, rec, err
	}
	r := newRun(env, s)
	err = r.play(ctx, func(ctx context.Context) (err error) {
		code, err = r.playProgram(ctx, p)
		return err
	})
	return code, r.stage, r.record, err
}

// playProgram puts the world and the edge in place, and runs the program.
func (r *run) playProgram(ctx context.Context, p Program) (code int, err error) {
	world, err := traffic.ServeOutside(r.lab.Routed, cmp.Or(r.stage.Kernel, kernelDefault))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, world.Close()) }()
	if err := r.routeOutside(world); err != nil {
		return 0, err
	}
	if r.stage.Edge != "" {
		r.proxy, err = edge.Start(ctx, r.lab.Edge, edge.Options{
			Executable: r.env.Executable, Args: r.env.Args, Config: r.agents.YAML() + r.stage.Edge, Hold: r.stage.Hold,
			Everything: true,
		})
		if err != nil {
			return 0, err
		}
	}
	before, err := r.usedTime()
	if err != nil {
		return 0, err
	}
	if p.Pcap != nil {
		sniffer, err := r.lab.Client.Dump(netlab.NearDevice, p.Pcap)
		if err != nil {
			return 0, err
		}
		defer func() {
			_, stopped := sniffer.Stop()
			err = errors.Join(err, stopped)
		}()
	}
	if p.Ready != nil {
		p.Ready(world.Host)
	}
	if code, err = r.runProgram(ctx, p, world); err != nil {
		return 0, err
	}
	after, err := r.usedTime()
	if err != nil {
		return code, err
	}
	r.record.CPU = after - before
	if up := r.lab.Path.Report(0, r.stage.Duration); up.Up.Bytes > up.Down.Bytes {
		r.stage.Actors[0].Kind = Upload
	}
	return code, nil
}

// routeOutside leads from the hosts to the world, by names as well.
func (r *run) routeOutside(world *traffic.Outside) error {
	err := r.lab.Edge.Route(netip.Prefix{}, r.lab.ServerAddr.V4)
	if err == nil && world.IPv6 {
		err = r.lab.Edge.Route(netip.Prefix{}, r.lab.ServerAddr.V6)
	} else if err == nil {
		// A program tries its IPv4 address at once then, as it does on this machine.
		err = r.lab.Client.Route(netip.MustParsePrefix("2000::/3"), netip.Addr{})
	}
	if err == nil && world.Resolver != "" {
		err = r.lab.Client.Cover(traffic.ResolverFile, world.Resolver)
	}
	return err
}

// runProgram runs the program to its end, which is that of the record.
func (r *run) runProgram(ctx context.Context, p Program, world *traffic.Outside) (code int, err error) {
	cmd := r.lab.Client.Command(ctx, p.Args[0], p.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), HostVariable+"="+world.Host.V4.String())
	over, told := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(told)
		tick := time.Tick(tellEvery)
		for {
			select {
			case <-tick:
				if p.Tell != nil {
					p.Tell(r.now(), r.lab.Path.Recent(tellEvery))
				}
			case <-r.ended():
				_ = cmd.Process.Signal(os.Interrupt) // what it measures has ended; so may have the program
				return
			case <-over:
				return
			}
		}
	}()
	r.lab.Path.Start()
	code, err = cmd.RunInForeground()
	r.stage.Duration = max(r.now().Truncate(Step), Step)
	close(over)
	<-told
	if err != nil {
		return 0, fmt.Errorf("run the program: %w", err)
	}
	select {
	case <-r.ended():
		return code, errors.New("the proxy ended before the program")
	default:
		return code, nil
	}
}
