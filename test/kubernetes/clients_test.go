//go:build linux

package kubernetes

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/netlab"
)

// body is what the server sends, or the first part of it.
var body = func() []byte {
	b := make([]byte, 64<<20)
	source := rand.NewChaCha8([32]byte{1})
	_, _ = source.Read(b) // which always succeeds
	return b
}()

const serverPort = 8000

// serve has a server outside of the cluster, which answers /N with N bytes.
func (c *cluster) serve() {
	var ln net.Listener
	require.NoError(c.t, c.outside.Do(func() (err error) {
		ln, err = net.Listen("tcp", net.JoinHostPort(serverAddr, strconv.Itoa(serverPort)))
		return err
	}))
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(
		func(w http.ResponseWriter, r *http.Request) {
			n, err := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/"))
			if err != nil || n > len(body) {
				http.NotFound(w, r)
				return
			}
			w.Header().Set("Content-Length", strconv.Itoa(n))
			_, _ = w.Write(body[:n]) // who does not get it says so
		})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(ln) // until it is closed
	}()
	c.t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
}

func url(n int) string { return fmt.Sprintf("http://%s:%d/%d", serverAddr, serverPort, n) }

// client is where "pod" is run: outside of the cluster, at a node of the network or in a pod.
type client func(args ...string) *netlab.Cmd

// at is a client at a node of the network.
func at(n *netlab.Node) client {
	return func(args ...string) *netlab.Cmd {
		return n.Command(context.Background(), place+"/bin/pod", args...)
	}
}

// clientPod starts a pod on a node that waits to be a client.
func (c *cluster) clientPod(on *node) client {
	c.t.Helper()
	name := "client-" + on.Name()
	c.apply(map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]string{"name": name},
		"spec": map[string]any{
			"nodeName": on.Name(), "containers": []any{map[string]string{"name": "pod", "image": podImage}},
		},
	})
	c.kubectl("wait", "--for=condition=Ready", "pod/"+name, "--timeout=60s")
	return func(args ...string) *netlab.Cmd {
		return c.outside.Command(context.Background(), place+"/bin/kubectl", append([]string{
			"--kubeconfig", c.file("admin.kubeconfig"), "exec", "-i", name, "--", "/pod",
		}, args...)...)
	}
}

func (c *cluster) apply(object any) {
	c.t.Helper()
	text, err := json.Marshal(object)
	require.NoError(c.t, err)
	_, err = c.program(string(text), "kubectl", "apply", "-f", "-")
	require.NoError(c.t, err)
}

// running is a command that has begun.
type running struct {
	cmd        *netlab.Cmd
	stdin      io.Closer
	said, errs *bytes.Buffer
}

func (c *cluster) begin(who client, args ...string) *running {
	c.t.Helper()
	r := &running{cmd: who(args...), said: &bytes.Buffer{}, errs: &bytes.Buffer{}}
	r.cmd.Stdout, r.cmd.Stderr = r.said, r.errs
	var err error
	r.stdin, err = r.cmd.StdinPipe()
	require.NoError(c.t, err)
	require.NoError(c.t, r.cmd.Start())
	return r
}

// end waits for the command and reads what it printed.
func (r *running) end(c *cluster, into any) {
	c.t.Helper()
	_ = r.stdin.Close() // which ends one that knocks
	require.NoError(c.t, r.cmd.Wait(), r.errs.String())
	require.NoError(c.t, json.Unmarshal(r.said.Bytes(), into), r.said.String())
}

// download begins one of n bytes; whole waits for it and compares.
func (c *cluster) download(who client, n int, flags ...string) (whole func() (seconds float64)) {
	c.t.Helper()
	r := c.begin(who, append(append([]string{"fetch"}, flags...), url(n))...)
	return func() float64 {
		c.t.Helper()
		var got struct {
			Bytes   int
			SHA256  string
			Seconds float64
		}
		r.end(c, &got)
		assert.Equal(c.t, n, got.Bytes)
		assert.Equal(c.t, fmt.Sprintf("%x", sha256.Sum256(body[:n])), got.SHA256)
		return got.Seconds
	}
}

// knock has a client make connections all the time, none of which may fail.
func (c *cluster) knock(who string, at client, flags ...string) (none func()) {
	c.t.Helper()
	r := c.begin(at, append(append([]string{"knock"}, flags...), url(1000))...)
	return func() {
		c.t.Helper()
		var got struct {
			Tried, Failed int
			First         string
			Seconds       float64
		}
		r.end(c, &got)
		c.t.Logf("new connections %s: %d of %d failed in %.1f s", who, got.Failed, got.Tried, got.Seconds)
		assert.NotZero(c.t, got.Tried)
		assert.Zero(c.t, got.Failed, got.First)
	}
}
