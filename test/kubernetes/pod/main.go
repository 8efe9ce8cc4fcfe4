//go:build linux

// Command pod is all that containers of the tests run beside Penstock, and what clients
// outside of the cluster run:
//
//	pod pause                     holds a pod's namespaces
//	pod fetch [flags] URL         downloads once, and prints what came
//	pod knock [flags] URL         one connection after the other until its input ends; prints how many failed
package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// Fetched is what fetch prints.
type Fetched struct {
	Bytes   int64
	SHA256  string
	Seconds float64
}

// Knocked is what knock prints.
type Knocked struct {
	Tried, Failed int
	First         string // why the first failed that did
	Seconds       float64
}

func main() {
	flags := flag.NewFlagSet("pod", flag.ExitOnError)
	proxy := flags.String("proxy", "", "`URL` of a proxy, such as socks5://10.96.0.5:1080")
	rate := flags.Int("rate", 0, "read no more than this many `bytes` per second; 0: as fast as it goes")
	every := flags.Duration("every", 20*time.Millisecond, "begin a connection as often")
	if len(os.Args) < 2 {
		fail(errors.New("want pause, fetch or knock"))
	}
	_ = flags.Parse(os.Args[2:]) // which exits
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	transport := &http.Transport{DisableKeepAlives: true}
	if *proxy != "" {
		u, err := url.Parse(*proxy)
		if err != nil {
			fail(err)
		}
		transport.Proxy = http.ProxyURL(u)
	}
	client := &http.Client{Transport: transport}
	switch os.Args[1] {
	case "pause":
		pause(ctx)
	case "fetch":
		got, err := fetch(ctx, client, flags.Arg(0), *rate)
		if err != nil {
			fail(err)
		}
		show(got)
	case "knock":
		client.Timeout = time.Minute // a busy machine is slow, and refuses no client
		ctx, end := context.WithCancel(ctx)
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin) // however it ends
			end()
		}()
		show(knock(ctx, client, flags.Arg(0), *every))
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "pod:", err)
	os.Exit(1)
}

func show(what any) {
	if err := json.NewEncoder(os.Stdout).Encode(what); err != nil {
		fail(err)
	}
}

// pause waits for the end, and for the processes that others leave to it.
func pause(ctx context.Context) {
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	for {
		select {
		case <-ctx.Done():
			return
		case <-children:
			for {
				if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
					break
				}
			}
		}
	}
}

func fetch(ctx context.Context, client *http.Client, from string, rate int) (got Fetched, err error) {
	began := time.Now()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, from, http.NoBody)
	if err != nil {
		return got, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return got, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return got, fmt.Errorf("GET %s: %s", from, answer.Status)
	}
	sum := sha256.New()
	const tenths = 10
	for {
		n, err := io.CopyN(sum, answer.Body, int64(max(rate/tenths, 64<<10)))
		got.Bytes += n
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return got, fmt.Errorf("after %d bytes: %w", got.Bytes, err)
		}
		if rate > 0 {
			time.Sleep(time.Until(began.Add(time.Duration(float64(got.Bytes) / float64(rate) * float64(time.Second)))))
		}
	}
	got.SHA256, got.Seconds = fmt.Sprintf("%x", sum.Sum(nil)), time.Since(began).Seconds()
	return got, nil
}

// knock does not wait for one connection to begin the next.
func knock(ctx context.Context, client *http.Client, at string, every time.Duration) (all Knocked) {
	var mu sync.Mutex
	var running sync.WaitGroup
	began := time.Now()
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			running.Wait()
			all.Seconds = time.Since(began).Seconds()
			return all
		case <-ticks.C:
		}
		running.Go(func() {
			_, err := fetch(context.WithoutCancel(ctx), client, at, 0)
			mu.Lock()
			defer mu.Unlock()
			all.Tried++
			if err != nil {
				if all.Failed++; all.First == "" {
					all.First = err.Error()
				}
			}
		})
	}
}
