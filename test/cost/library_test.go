//go:build linux

package cost

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/alcc"
)

// libraryEnv makes this test binary an HTTP server, with the library if it says so.
const libraryEnv = "PENSTOCK_COST_LIBRARY"

const (
	libraryRounds    = 5 // of each server, in turns: medians are compared
	libraryDownloads = 8
	libraryBytes     = 1 << 30 // of one download
)

// BenchmarkLibrary compares the processor time that an HTTP server takes to send a gigabyte, with the library and
// without it. Clients are on the same machine, where no window binds.
func BenchmarkLibrary(b *testing.B) {
	for range b.N {
		costs := map[string][]float64{}
		for range libraryRounds {
			for _, with := range []string{"plain", "library"} {
				costs[with] = append(costs[with], libraryCost(b, with))
			}
		}
		median := func(with string) float64 {
			slices.Sort(costs[with])
			b.Logf("%s: %.3f s/GB", with, costs[with])
			return costs[with][libraryRounds/2]
		}
		plain, library := median("plain"), median("library")
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(plain, "plain-s/GB")
		b.ReportMetric(library, "library-s/GB")
		b.ReportMetric(library/plain, "x-CPU")
	}
}

// libraryCost returns the seconds of processor time for a gigabyte of one server.
func libraryCost(b *testing.B, with string) float64 {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), libraryEnv+"="+with)
	cmd.Stderr = os.Stderr
	said, err := cmd.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	url, err := bufio.NewReader(said).ReadString('\n')
	require.NoError(b, err)
	download := func(bytes int64) {
		transport := &http.Transport{DisableKeepAlives: true}
		r, err := (&http.Client{Transport: transport}).Get(strings.TrimSpace(url))
		if err != nil {
			b.Error(err)
			return
		}
		defer r.Body.Close()
		if _, err := io.CopyN(io.Discard, r.Body, bytes); err != nil {
			b.Error(err)
		}
	}
	download(1 << 20) // the library has started
	before := cpuTime(b, cmd.Process.Pid)
	var all sync.WaitGroup
	for range libraryDownloads {
		all.Go(func() { download(libraryBytes) })
	}
	all.Wait()
	return (cpuTime(b, cmd.Process.Pid) - before).Seconds() / (libraryDownloads * libraryBytes / 1e9)
}

// serveLibrary serves bytes without end over HTTP, and ends with its process.
func serveLibrary(with string) error {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if with == "library" {
		if ln, err = alcc.NewListener(ln, alcc.Options{}); err != nil {
			return err
		}
	}
	fmt.Printf("http://%s/\n", ln.Addr())
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for piece := make([]byte, 256<<10); ; {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	})
	return http.Serve(ln, handler) //nolint:gosec // of a benchmark
}
