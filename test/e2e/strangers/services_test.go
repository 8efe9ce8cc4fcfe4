//go:build linux

package strangers

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/websocket"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/netlab"
)

// nginx serves the scene's directory on ports 80 and 81 and, over TLS, 443. What is below /socket/ it asks of a server
// of its own machine at port 9000.
func (s *scene) nginx(program string) {
	s.t.Helper()
	certificate, key := certs.PEM(certs.SelfSigned("files.example"))
	s.write("cert.pem", certificate)
	s.write("key.pem", key)
	s.serve(s.Server, 443, program, "-p", s.dir, "-e", "stderr", "-c", s.write("nginx.conf", fmt.Sprintf(
		"daemon off; user root; pid %[1]s/nginx.pid; error_log stderr;\nevents {}\nhttp { access_log off; server {\n"+
			"listen %[2]v:80; listen %[2]v:81; listen %[2]v:443 ssl http2; server_name files.example;\n"+
			"ssl_certificate %[1]s/cert.pem; ssl_certificate_key %[1]s/key.pem;\n"+
			"client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;\n"+
			"uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi; root %[1]s; client_max_body_size 0;\n"+
			"location /put/ { dav_methods PUT; }\nlocation /socket/ { proxy_pass http://127.0.0.1:9000; "+
			"proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade; }\n} }\n", s.dir, s.ServerAddr.V4)))
}

func TestNginx(t *testing.T) {
	is := find(t, "nginx", "curl")
	s := captured(t, 80, 443)
	file := s.file("file", 1, size)
	require.NoError(t, os.MkdirAll(s.dir+"/put", 0o755)) //nolint:gosec // the server's
	s.nginx(is["nginx"])
	curl := func(args ...string) string {
		t.Helper()
		return s.run(nil, is["curl"], append([]string{
			"-sS", "--fail", "--noproxy", "*", "--cacert", s.dir + "/cert.pem",
			"--resolve", fmt.Sprintf("files.example:443:%v", s.ServerAddr.V4),
		}, args...)...)
	}
	plain := fmt.Sprintf("http://%v/", s.ServerAddr.V4)
	curl("-o", s.dir+"/got", plain+"file")
	s.same(file, s.dir+"/got")
	streams := curl("--http2", "--parallel", "-w", "%{http_version} %{num_connects}\n", "-o", s.dir+"/secret#1",
		"https://files.example/file?[1-3]")
	assert.Equal(t, 3, strings.Count(streams, "2 "), "streams of HTTP/2")
	assert.Equal(t, 1, strings.Count(streams, " 1\n"), "on one connection")
	s.same(file, s.dir+"/secret3")
	curl("-T", file, plain+"put/file")
	s.same(file, s.dir+"/put/file")
	whole, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, hash(whole[1000:2*megabyte]), hash([]byte(curl("-r", "1000-2097151", plain+"file"))), "a range")
	s.carried(4)
}

func TestWebSocket(t *testing.T) {
	is := find(t, "nginx")
	s := captured(t, 80)
	s.nginx(is["nginx"])
	ln, err := s.Server.Listen("tcp4", "127.0.0.1:9000")
	require.NoError(t, err)
	server := &http.Server{Handler: websocket.Handler(func(ws *websocket.Conn) { _, _ = io.Copy(ws, ws) })}
	go func() { _ = server.Serve(ln) }()
	t.Cleanup(func() { _ = server.Close() })
	conn, err := s.Client.Dial("tcp4", s.ServerAddr.V4.String()+":80")
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	config, err := websocket.NewConfig("ws://files.example/socket/", "http://files.example/")
	require.NoError(t, err)
	ws, err := websocket.NewClient(config, conn)
	require.NoError(t, err)
	for _, size := range []int{1, 125, 126, 70_000, megabyte} { // each form of a frame's length
		text := strings.Repeat("ü", size)
		go func() { assert.NoError(t, websocket.Message.Send(ws, text)) }()
		back := make([]byte, len(text))
		_, err := io.ReadFull(ws, back)
		require.NoError(t, err)
		require.Equal(t, hash([]byte(text)), hash(back), size)
	}
	s.carried(1)
}

// TestSegmentsComeInTimeBesideDownloads has a player of segments on a link that four downloads share with it. Its even
// share is too little. A rule gives it what it needs.
func TestSegmentsComeInTimeBesideDownloads(t *testing.T) {
	is := find(t, "nginx", "curl")
	const (
		length = 2 * time.Second
		rate   = cc.Rate(3e6)
		link   = cc.Rate(8e6)
		lasts  = 16 * time.Second
	)
	for rules, rebuffers := range map[string]bool{
		"": true,
		"rules: [{name: video, match: {ports: [81]}, down: {class: guarantee, target: 4mbit}}]\n": false,
	} {
		labtest.Need(t)
		lab, err := netlab.NewCellular(netlab.CellularConfig{
			Down: sim.LinkConfig{Rate: link, Delay: 20 * time.Millisecond, QueueBytes: 500_000},
			Up:   sim.LinkConfig{Delay: 20 * time.Millisecond},
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, lab.Close()) })
		s := newScene(t, lab.Routed)
		s.start(edge.Options{Ports: []uint16{80, 81}, Config: "defaults: {algorithm: penstock}\n" + rules})
		s.nginx(is["nginx"])
		playlist := "#EXTM3U\n"
		for i := range int(lasts / length) {
			s.file(fmt.Sprintf("video/%d.ts", i), byte(i), int64(rate.BytesIn(length)))
			playlist += fmt.Sprintf("#EXTINF:%v,\n%d.ts\n", length.Seconds(), i)
		}
		s.write("video/index.m3u8", playlist)
		require.NoError(t, os.Truncate(s.write("endless", ""), 1<<40))
		lab.Path.Start()
		for range 4 {
			s.serve(s.Client, 0, is["curl"], "-sS", "--noproxy", "*", "-o", "/dev/null",
				fmt.Sprintf("http://%v/endless", s.ServerAddr.V4))
		}
		played := s.watch(fmt.Sprintf("http://%v:81/video/", s.ServerAddr.V4), length, lasts)
		t.Logf("%q: %+v", rules, played)
		assert.Positive(t, played.Played)
		assert.Equal(t, rebuffers, played.Rebuffers > 0, rules)
	}
}

// watch plays the segments that a playlist names, for a while at most.
func (s *scene) watch(url string, length, lasts time.Duration) sim.Playback {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), lasts)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DialContext: s.Client.DialContext}}
	defer client.CloseIdleConnections()
	get := func(name string) (body []byte, err error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+name, nil)
		require.NoError(s.t, err)
		answer, err := client.Do(request)
		if err == nil {
			defer answer.Body.Close()
			body, err = io.ReadAll(answer.Body)
		}
		return body, err
	}
	began := time.Now()
	p := sim.Player{Video: sim.Video{Chunk: length, Buffer: 5 * length}}
	playlist, err := get("index.m3u8")
	require.NoError(s.t, err)
	for name := range strings.FieldsSeq(string(playlist)) {
		if strings.HasPrefix(name, "#") {
			continue
		}
		body, err := get(name)
		if err != nil {
			require.ErrorIs(s.t, err, context.DeadlineExceeded)
			break
		}
		s.same(s.dir+"/video/"+name, s.write("seen/"+name, string(body)))
		p.Arrived(time.Since(began))
		time.Sleep(p.Room(time.Since(began)) - time.Since(began)) //nolint:forbidigo // the player's buffer is full
	}
	return p.Playback(min(time.Since(began), lasts))
}

func TestRedis(t *testing.T) {
	is := find(t, "redis-server", "redis-cli")
	s := captured(t, 6379)
	file := s.file("file", 1, size)
	s.serve(s.Server, 6379, is["redis-server"], "--bind", s.ServerAddr.V4.String(), "--save", "",
		"--protected-mode", "no")
	cli := func(stdin io.Reader, args ...string) string {
		t.Helper()
		return s.run(stdin, is["redis-cli"], append([]string{"-h", s.ServerAddr.V4.String()}, args...)...)
	}
	in, err := os.Open(file)
	require.NoError(t, err)
	defer in.Close()
	assert.Equal(t, "OK\n", cli(in, "-x", "SET", "file"))
	got := cli(nil, "--raw", "GET", "file")
	assert.Equal(t, sumOf(t, file), hash([]byte(strings.TrimSuffix(got, "\n"))))

	const commands = 20_000 // in a pipeline
	var pipe bytes.Buffer
	for range commands {
		pipe.WriteString("INCR counter\r\n")
	}
	assert.Contains(t, cli(&pipe, "--pipe"), fmt.Sprintf("errors: 0, replies: %d", commands))
	assert.Equal(t, fmt.Sprintf("%d\n", commands), cli(nil, "--raw", "GET", "counter"))
	s.carried(4)
}

func TestPostgreSQL(t *testing.T) {
	is := find(t, "psql", "initdb", "postgres", "setpriv")
	s := captured(t, 5432)
	data := filepath.Join(s.dir, "data")
	require.NoError(t, os.Mkdir(data, 0o700))
	require.NoError(t, os.Chown(data, nobody, nobody))
	user := []string{fmt.Sprintf("--reuid=%d", nobody), fmt.Sprintf("--regid=%d", nobody), "--clear-groups"}
	s.run(nil, is["setpriv"], append(user, is["initdb"], "-A", "trust", "-U", "ann", "-N", "-D", data)...)
	access, err := os.OpenFile(filepath.Join(data, "pg_hba.conf"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = fmt.Fprintln(access, "host all all 10.77.0.0/16 trust")
	require.NoError(t, err)
	require.NoError(t, access.Close())
	s.serve(s.Server, 5432, is["setpriv"], append(user, is["postgres"], "-D", data, "-k", data,
		"-h", s.ServerAddr.V4.String(), "-F")...)
	psql := func(stdin io.Reader, sql string) string {
		t.Helper()
		return s.run(stdin, is["psql"], "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1",
			"-h", s.ServerAddr.V4.String(), "-U", "ann", "-d", "postgres", "-c", sql)
	}
	var rows bytes.Buffer
	for i := range 200_000 {
		fmt.Fprintf(&rows, "%d\t%s\n", i, hash([]byte{byte(i), byte(i >> 8), byte(i >> 16)}))
	}
	want := hash(rows.Bytes())
	psql(nil, "CREATE TABLE rows (number int, text text)")
	psql(&rows, "COPY rows FROM STDIN")
	assert.Equal(t, want, hash([]byte(psql(nil, "COPY (SELECT * FROM rows ORDER BY number) TO STDOUT"))))
	assert.Equal(t, "200000\n", psql(nil, "SELECT count(*) FROM rows"))
	s.carried(4)
}

// nobody is the user and group of servers that refuse to be root.
const nobody = 65534

func TestIperf3(t *testing.T) {
	is := find(t, "iperf3")
	s := captured(t, 5201)
	s.serve(s.Server, 5201, is["iperf3"], "-s", "-B", s.ServerAddr.V4.String())
	// The server takes one test at a time, and may not have heard yet that the one before has ended.
	const busy = "the server is busy running a test. try again later"
	for _, flags := range [][]string{nil, {"-R"}, {"-P", "4"}} {
		const bytes = 40 * megabyte
		args := []string{"-J", "-c", s.ServerAddr.V4.String(), "-n", fmt.Sprint(bytes)}
		type result struct {
			Error string
			End   struct {
				Sent     struct{ Bytes float64 } `json:"sum_sent"`
				Received struct{ Bytes float64 } `json:"sum_received"`
			}
		}
		report := result{Error: busy}
		for tries := 0; report.Error == busy && tries < 100; tries++ {
			out := s.run(nil, is["iperf3"], append(args, flags...)...)
			report = result{}
			require.NoError(t, json.Unmarshal([]byte(out), &report))
		}
		assert.Empty(t, report.Error)
		assert.GreaterOrEqual(t, report.End.Sent.Bytes, float64(bytes), flags)
		assert.Positive(t, report.End.Received.Bytes, flags) // a test ends with what was sent
	}
	s.carried(9) // each has a connection for its control
}
