package main

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli/clitest"
)

// TestSocketsOfSystemdServeAcrossARestart hands sockets over as systemd does, and has a
// client connect while no proxy runs.
func TestSocketsOfSystemdServeAcrossARestart(t *testing.T) {
	var plain net.ListenConfig
	plain.SetMultipathTCP(false)
	var addresses []string
	var files []*os.File
	for range 2 {
		ln, err := plain.Listen(t.Context(), "tcp4", "127.0.0.1:0")
		require.NoError(t, err)
		defer ln.Close()
		file, err := ln.(*net.TCPListener).File()
		require.NoError(t, err)
		defer file.Close()
		addresses, files = append(addresses, ln.Addr().String()), append(files, file)
	}
	config := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(config, []byte("listeners: [{name: local, mode: connect, address: \""+
		addresses[0]+"\"}]\ntelemetry: {address: \"off\"}\n"), 0o600))
	program, err := os.Executable()
	require.NoError(t, err)

	for range 2 {
		client, err := net.Dial("tcp4", addresses[0])
		require.NoError(t, err, "somebody listens, though nobody serves yet")
		require.NoError(t, client.SetDeadline(time.Now().Add(20*time.Second)))
		_, err = io.WriteString(client, "GET / HTTP/1.1\r\n\r\n")
		require.NoError(t, err)

		cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ exec "$0" run --keep-privileges --config "$1"`, program, config)
		cmd.Env = append(clitest.Environment(), "LISTEN_FDS=2")
		cmd.ExtraFiles = files
		var log bytes.Buffer
		cmd.Stderr = &log
		require.NoError(t, cmd.Start())
		line, err := bufio.NewReader(client).ReadString('\n')
		assert.NoError(t, err)
		assert.True(t, strings.HasPrefix(line, "HTTP/1.1 405 "), line)
		_ = client.Close()
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		require.NoError(t, cmd.Wait(), "%s", &log)
		assert.Contains(t, log.String(), "a socket was handed over that no listener has")
		assert.Contains(t, log.String(), addresses[1])
	}
}
